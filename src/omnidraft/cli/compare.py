"""The commands that compare methods: bench and demo."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.cli.common import check_options, check_writable, engines, err, load, out
from omnidraft.cli.options import (
    Device,
    DrafterEngine,
    DrafterName,
    DrafterPrecision,
    Engine,
    K,
    MaxTokens,
    Precision,
    Seed,
    Settings,
    Target,
    Temperature,
    TopP,
)
from omnidraft.errors import OmniDraftError, OptionError

if TYPE_CHECKING:
    from omnidraft.decode import Chunk
    from omnidraft.engine import OmniDraft

_COLOURS = {"drafted": "green", "lookup": "magenta", "correction": "yellow", "free": "cyan"}


def bench(
    target: Target,
    task: Annotated[str, typer.Option(help="Tasks or files of prompts, separated by commas.")],
    drafter: DrafterName = DEFAULT_DRAFTER,
    data: Annotated[Path, typer.Option(help="Folder of the task data.")] = Path("../shared/data"),
    limit: Annotated[int, typer.Option(help="Prompts per task.")] = 10,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, separated by commas, with verification, splits and k if wanted: plain,text:k4,prefill:trie,"
            "direct:compare:splits. Speedup is against plain."
        ),
    ] = ("plain,text,auto"),
    k: K = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 64,
    repeat: Annotated[int, typer.Option(help="Repeats of everything; speeds are medians.")] = 1,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "auto",
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Compare methods on the same prompts, interleaved in one run."""
    from omnidraft import bench as benchmark
    from omnidraft.provenance import provenance
    from omnidraft.tasks import load_task

    chosen = list(dict.fromkeys(methods.split(",")))
    options: dict[str, Any] = dict(
        k=k, temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens
    )
    prompts = {name: load_task(name, data, limit) for name in task.split(",")}
    if repeat < 1:
        raise OptionError(f"repeat is {repeat}; it must be 1 or more")
    if as_json:
        check_writable(as_json)
    for method in chosen:
        check_options(options | benchmark.method_options(method))
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    model = load(target, drafter, options, **where)
    with _progress(len(chosen) * repeat * sum(map(len, prompts.values()))) as advance:
        runs = benchmark.run(
            model.target,
            model.drafter,
            prompts,
            chosen,
            repeat=repeat,
            on_run=lambda run: advance(),
            **options,
        )
    rows = benchmark.rows(runs, k=k, temperature=temperature, seed=seed)
    out.print(_results_table(rows))
    if as_json:
        record = {
            "provenance": provenance()
            | {"target": target, "drafter": drafter, "engines": model.engines, **options},
            "rows": rows,
            "answers": benchmark.answers(runs),
        }
        as_json.write_text(json.dumps(record, indent=1) + "\n")


def demo(
    target: Target = "qwen2.5-coder-0.5b",
    drafter: DrafterName = DEFAULT_DRAFTER,
    k: K = None,
    max_tokens: MaxTokens = 48,
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "auto",
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Compare the methods on ten prompts, coloured by where each piece came from; then learn from two streams."""
    from omnidraft import bench as benchmark
    from omnidraft.demo import PROMPTS

    options: dict[str, Any] = dict(k=k, max_tokens=max_tokens)
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    model = load(target, drafter, options, **where)
    legend = "  ".join(f"[{colour}]{name}[/]" for name, colour in _COLOURS.items())
    drafting = "drafting as much as pays" if k is None else f"k = {k}"
    out.print(f"[bold]{target}[/] with drafter [bold]{drafter}[/], {drafting}: {legend}")
    for role, its in model.engines.items():
        reason = f" ({its['reason']})" if its["reason"] else ""
        out.print(f"[dim]{role}: {its['name']}, {its['precision']}, {its['device']}{reason}[/]")
    out.print("[dim]Each prompt is answered by every method in turn; what you see is `auto`.[/]")
    shown: set[str] = set()

    def show(method: str, prompt: str, chunk: Chunk) -> None:
        if method != "auto":
            return
        if prompt not in shown:
            shown.add(prompt)
            out.print(f"\n\n[bold]> {prompt.splitlines()[0]}[/]")
        for text, source in chunk.pieces:
            out.print(text, style=_COLOURS[source], end="", markup=False)

    methods = ["plain", "text", "auto"]
    runs = benchmark.run(model.target, model.drafter, {"demo": PROMPTS}, methods, on_chunk=show, **options)
    out.print("\n")
    out.print(_results_table(benchmark.rows(runs, k=k, temperature=0.0, seed=None)))
    _learn(model, options)


def _learn(model: OmniDraft, options: dict[str, Any]) -> None:
    """Stream the prompts of each domain while learning, and show what that gained on those held out."""
    from omnidraft.demo import HELD_OUT, STREAMS

    try:
        # Few and short answers: an update for each, and a large one.
        learner = model.learn(budget=1.0, batch=1, learning_rate=3e-3)
    except OmniDraftError as error:  # PEFT is missing, or the engine cannot adapt its models
        out.print(f"\nLearning is left out: {error}", style="dim", markup=False)
        return
    from omnidraft.learn.adapt import adapt, measured

    fixed = options | {"method": "text", "k": options["k"] or 4}  # the same effort throughout
    table = Table("domain", "", box=None, pad_edge=False)
    for name in ("tokens/step", "acceptance"):
        table.add_column(name, justify="right")
    for domain, prompts in STREAMS.items():
        stream, held_out = prompts[:-HELD_OUT], prompts[-HELD_OUT:]
        out.print(
            f"\n[bold]Learning from {domain}[/] [dim]({HELD_OUT} others are answered before and after)[/]"
        )

        def show(point: dict[str, Any], stream: Sequence[str] = stream) -> None:
            prompt = stream[point["answer"] - 1]
            out.print(
                f"{point['answer']:2} of {len(stream)}  {point['tokens'] / point['steps']:.2f} tokens/step, "
                f"acceptance {point['acceptance_rate'] or 0:.2f}  [dim]{prompt}[/]",
                overflow="ellipsis",
                no_wrap=True,
                soft_wrap=False,
            )

        result = adapt(model, learner, stream, held_out, on_answer=show, **fixed)
        found = result["held_out"]
        rows = dict(before=found["before"], during=measured(result["curve"]), after=found["after"])
        name = domain
        for when, row in rows.items():
            table.add_row(name, when, f"{row['tokens_per_step']:.2f}", f"{row['acceptance_rate'] or 0:.3f}")
            name = ""
    out.print()
    out.print(table)


def _results_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of a benchmark, for the terminal."""
    table = Table("task", "method", box=None, pad_edge=False)
    for name in ("acceptance", "tokens/step", "tokens/s", "speedup", "other ms", "same"):
        table.add_column(name, justify="right")

    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        same = "" if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
        table.add_row(
            row["task"],
            row["method"],
            number(row["acceptance_rate"], ".3f"),
            number(row["tokens_per_step"]),
            number(row["tokens_per_second"]),
            number(row["speedup"]) + ("x" if row["speedup"] else ""),
            number(row["other_ms_per_step"]),
            same,
        )
    return table


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
