"""Tokens per step of drafters on recorded answers of a target, which is not run: the same on every machine.

    python benchmarks/acceptance.py --drafter omnidraft-nano --json results/nano_acceptance.json FILE ...

FILE: greedy answers to test prompts, as `omnidraft.learn.record` keeps them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import process_time
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import hub, load_model
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.experiments.replay import Replay
from omnidraft.learn import record
from omnidraft.provenance import provenance
from omnidraft.spellings import Lexicon
from omnidraft.vocab import Alignment


def main(
    files: list[Path],
    drafter: Annotated[list[str], typer.Option(help="May be repeated.")],
    limit: Annotated[int, typer.Option(help="Answers of each file.")] = 12,
    k: Annotated[int, typer.Option("-k")] = 4,
    engine: str = "openvino",
    as_json: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Method `text`, greedy, k draft tokens a step; processor time is the drafter's and the loop's."""
    rows: list[dict[str, Any]] = []
    table = Table("answers", "drafter", "acceptance", "tokens/step", "ms/step", box=None)
    for name in drafter:
        model = load_model(name, engine=engine, drafts=True)
        for file in files:
            answers, about = record.load(file)
            target = CheckpointModel(hub.pull(about["target"]), about["target"])
            lexicon = Lexicon.cached(Alignment(model.vocab, target.vocab), hub.cache_root() / "lexicons")
            replay, session = Replay(lexicon, "text", k), model.session()
            start = process_time()
            results = [replay.answer(one, session) for one in answers[:limit]]
            seconds = process_time() - start
            tokens, steps = (sum(one[what] for one in results) for what in ("tokens", "steps"))
            row = {
                "answers": file.name,
                "drafter": Path(name).name,
                "prompts": len(results),
                "k": k,
                "acceptance_rate": sum(one["acceptance"] * one["steps"] for one in results) / steps,
                "tokens_per_step": tokens / steps,
                "processor_ms_per_step": 1000 * seconds / steps,
                "results": results,
            }
            rows.append(row)
            shown = (row["acceptance_rate"], row["tokens_per_step"], row["processor_ms_per_step"])
            table.add_row(file.name, row["drafter"], *(f"{value:.3f}" for value in shown))
    Console().print(table)
    if as_json:
        document = {"provenance": provenance() | {"engine": engine}, "rows": rows}
        as_json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
