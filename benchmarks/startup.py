"""How long the package takes to import and the command line to say its help.

    python benchmarks/startup.py [--json results/startup.json]

Each is run in a process of its own, in turns; user and system seconds say more than wall time where a machine is
shared. `python -X importtime -c "import omnidraft.cli"` says where they go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from omnidraft.provenance import provenance

_MAIN = "from omnidraft.cli import main; main()"
PROGRAMS = {
    "python alone": ("pass",),
    "import omnidraft": ("import omnidraft",),
    "omnidraft --help": (_MAIN, "--help"),
    "omnidraft generate --help": (_MAIN, "generate", "--help"),
    "omnidraft bench --help": (_MAIN, "bench", "--help"),
    "omnidraft models --help": (_MAIN, "models", "--help"),
}


def measure(program: tuple[str, ...]) -> dict[str, float]:
    """Seconds of one run."""
    before, start = os.times(), perf_counter()
    subprocess.run([sys.executable, "-c", *program], stdout=subprocess.DEVNULL, check=True)
    wall, after = perf_counter() - start, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return {"wall": wall, "cpu": cpu}


def main(
    repeat: Annotated[int, typer.Option(help="Runs of each; medians are shown.")] = 9,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Measure start-up times."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for _ in range(repeat):
        for name, program in PROGRAMS.items():
            runs[name].append(measure(program))
    rows: list[dict[str, Any]] = [
        {"what": name} | {kind: round(median(run[kind] for run in own), 3) for kind in ("cpu", "wall")}
        for name, own in runs.items()
    ]
    for row in rows:
        print(f"{row['what']:28} {row['cpu']:6.3f} s of CPU {row['wall']:6.3f} s in all")
    if as_json:
        record = {"provenance": provenance(), "repeat": repeat, "seconds": rows}
        as_json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
