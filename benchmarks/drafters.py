"""Drafters side by side on one target: they and plain decoding take turns prompt by prompt, in rotated order.

python benchmarks/drafters.py --drafter omnidraft-nano --drafter smollm2-135m --json drafters.json
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import OmniDraft, bench, load_model
from omnidraft.provenance import provenance
from omnidraft.tasks import load_task


def main(
    drafter: Annotated[list[str], typer.Option(help="May be repeated.")],
    target: str = "qwen2.5-coder-0.5b",
    task: str = "gsm8k,mbpp",
    data: Path = Path("../shared/data"),
    limit: Annotated[int, typer.Option(help="Prompts per task.")] = 5,
    methods: Annotated[str, typer.Option(help="As `omnidraft bench` has them.")] = "text",
    k: Annotated[int | None, typer.Option("-k", help="Draft tokens a step; as many as pay.")] = None,
    max_tokens: int = 64,
    engine: str = "openvino",
    as_json: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Tokens per step and per second, by task, drafter and method."""
    verifier = load_model(target, engine=engine)
    ways: dict[str, tuple[OmniDraft, dict[str, Any]]] = {
        "plain": (OmniDraft(verifier, None), {"method": "plain"})
    }
    drafters = {name: load_model(name, engine=engine, drafts=True) for name in drafter}
    for name, method in product(drafter, methods.split(",")):
        model = OmniDraft(verifier, drafters[name])
        ways[f"{Path(name).resolve().name} {method}"] = model, bench.method_options(method)
    runs: list[bench.Run] = []
    names = list(ways)
    for one in task.split(","):
        for i, prompt in enumerate(load_task(one, data, limit)):
            turn = i % len(names)
            for name in [*names[turn:], *names[:turn]]:
                model, options = ways[name]
                model.reset()
                stream = model.stream(prompt, **dict(k=k, max_tokens=max_tokens, temperature=0.0) | options)
                for _ in stream.chunks():
                    pass
                runs.append(bench.Run(one, name, 0, i, tuple(stream.tokens), stream.stats))
    rows = bench.rows(runs, k=k, temperature=0.0, seed=None)
    table = Table("task", "drafter and method", "acceptance", "tokens/step", "tokens/s", "speedup", box=None)
    for row in rows:
        shown = (row[name] for name in ("acceptance_rate", "tokens_per_step", "tokens_per_second", "speedup"))
        table.add_row(
            row["task"], row["method"], *("" if value is None else f"{value:.2f}" for value in shown)
        )
    Console().print(table)
    if as_json:
        about = {"target": target, "engine": engine, "k": k, "max_tokens": max_tokens}
        record = {"provenance": provenance() | about, "rows": rows, "answers": bench.answers(runs)}
        as_json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
