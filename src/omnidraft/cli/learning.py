"""The command that learns from a stream: adapt."""

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
    FixedK,
    MaxTokens,
    Precision,
    Seed,
    Settings,
    Target,
    Temperature,
)
from omnidraft.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from omnidraft.learn.learner import Learner
    from omnidraft.learn.traces import Trace


def adapt(
    target: Target,
    task: Annotated[
        str | None, typer.Option(help="A task: its training split is the stream, its test split judges.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts of your own instead; every tenth judges.")
    ] = None,
    drafter: DrafterName = DEFAULT_DRAFTER,
    data: Annotated[Path, typer.Option(help="Folder of the task data.")] = Path("../shared/data"),
    limit: Annotated[int, typer.Option(help="Prompts of the stream.")] = 100,
    held_out: Annotated[int, typer.Option(help="Prompts that are answered before and after.")] = 20,
    profile: Annotated[str, typer.Option(help="Where what is learned is kept.")] = "default",
    learn: Annotated[str, typer.Option(help="When to learn: between answers, idle, or off.")] = "between",
    loss: Annotated[str | None, typer.Option(help="What to learn (docs/learning.md).")] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Train an acceptance head, which ends drafts: joint, interleaved, only (the head alone) or off."
        ),
    ] = None,
    gamma: Annotated[
        float, typer.Option(help="The head ends a draft when it is rejected with more than this probability.")
    ] = 0.5,
    pretrain: Annotated[
        Path | None, typer.Option(help="A recorded stream (`omnidraft.learn.record`) to learn from first.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Share of the time that learning may take.")] = 0.3,
    rank: Annotated[int | None, typer.Option(help="Of the LoRA adapter.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of AdamW.")] = None,
    method: Annotated[str, typer.Option(help="direct, ngram, prefill, text or auto.")] = "auto",
    k: FixedK = 4,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 64,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write curve and result here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve here, as PNG or SVG.")] = None,
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "transformers",  # any drafter can learn there
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Answer a stream of prompts while learning from it; goes on where an earlier run was stopped."""
    stream, judges = _prompts(task, prompts, data, limit, held_out)
    for path in (as_json, plot):
        if path:
            check_writable(path)
    if plot:
        _check_plot(plot)
    options: dict[str, Any] = dict(
        method=method, k=k, temperature=temperature, seed=seed, max_tokens=max_tokens
    )
    check_options(options)
    given = dict(loss=loss, head=head, rank=rank, learning_rate=learning_rate)
    training: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    _check_learning(method, profile, learn, budget, gamma, training)
    recorded = _recorded(pretrain, target, drafter) if pretrain else []
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    model = load(target, drafter, options, **where)
    from omnidraft.learn.adapt import adapt as run
    from omnidraft.provenance import provenance

    learner = model.learn(learn, profile=profile, budget=budget, gamma=gamma, **training)
    if learner.problem:
        err.print(f"warning: {learner.problem}", markup=False)
    try:
        if not (learner.account.updates or learner.account.head_updates):  # else an earlier run did
            learner.pretrain(recorded)
        with _live(len(stream), learner) as show:
            result = run(model, learner, stream, judges, on_answer=show, **options)
    finally:
        model.close()
    out.print(_held_out_table(result["held_out"]))
    record = {
        "provenance": provenance() | {"engines": model.engines, **options},
        "task": task or str(prompts),
        "target": target,
        "drafter": drafter,
        "profile": profile,
        "loss": learner.learning.training.loss,
        "head": learner.learning.training.head,
        "gamma": gamma,
        "seed": seed,
        **result,
    }
    if as_json:
        as_json.write_text(json.dumps(record, indent=1) + "\n")
    if plot:
        from omnidraft.learn.plot import draw_curve

        draw_curve(record, plot)


def _prompts(
    task: str | None, prompts: Path | None, data: Path, limit: int, held_out: int
) -> tuple[list[str], list[str]]:
    from omnidraft.tasks import load_task

    for name, value in (("limit", limit), ("held-out", held_out)):
        if value < 1:
            raise OptionError(f"{name} is {value}; it must be 1 or more")
    if (task is None) == (prompts is None):
        raise OptionError("the stream is missing or there are two; give --task NAME or --prompts FILE")
    if task is not None:
        return load_task(task, data, limit, split="train"), load_task(task, data, held_out)
    own = load_task(str(prompts), data, limit + held_out)
    judges = own[9::10][:held_out]
    if not judges:
        raise OptionError(f"{prompts} has {len(own)} prompts; ten are the least: every tenth judges")
    return [prompt for i, prompt in enumerate(own) if i % 10 != 9][:limit], judges


def _recorded(path: Path, target: str, drafter: str) -> list[Trace]:
    from omnidraft.learn.record import load as load_recording

    stream, about = load_recording(path)
    if (about.get("target"), about.get("drafter")) != (target, drafter):
        raise OptionError(
            f"{path} was recorded for {about.get('drafter')} with {about.get('target')}; record one for this pair"
        )
    return [one.trace for one in stream if one.trace]


def _check_learning(
    method: str, profile: str, learn: str, budget: float, gamma: float, training: dict[str, Any]
) -> None:
    """Refuse what `OmniDraft.learn` would, before a model is loaded."""
    if method in ("plain", "lookup"):
        raise OptionError(f"method {method} has no drafter to learn; choose another method")
    try:
        from omnidraft.learn.learner import learning_of
        from omnidraft.learn.manifest import check_name
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "learn") from error
    check_name(profile)
    learning_of(learn, budget, gamma, training)


def _check_plot(path: Path) -> None:
    from importlib.util import find_spec

    if path.suffix.lower() not in (".png", ".svg"):
        raise OptionError(f"{path} is not a picture's name; end it in .png or .svg")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")


@contextmanager
def _live(total: int, learner: Learner) -> Iterator[Any]:
    """A line that is renewed after each answer: where it stands, and the last twenty answers."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from omnidraft.learn.adapt import rolling

    points: list[dict[str, Any]] = []
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        line = progress.add_task("", total=total)

        def show(point: dict[str, Any]) -> None:
            points.append(point)
            last = points[-20:]
            speed = sum(p["tokens"] for p in last) / sum(p["seconds"] for p in last)
            account = learner.account
            loss = "" if account.loss is None else f", loss {account.loss:.3f}"
            progress.update(
                line,
                completed=point["answer"],
                description=f"{rolling(points)[-1]:.2f} tokens/step, {speed:.1f} tokens/s, "
                f"{sum(p['drafted'] for p in last) / sum(p['steps'] for p in last):.1f} drafted/step, "
                f"{account.updates} updates{loss}, {len(learner.ngrams)} n-grams, "
                f"{account.seconds:.0f} s of learning",
            )

        yield show


def _held_out_table(held_out: dict[str, dict[str, Any]]) -> Table:
    table = Table("held out", box=None)
    for name in ("prompts", "tokens/step", "", "acceptance", "", "tokens/s"):
        table.add_column(name, justify="right")

    def between(interval: Sequence[float] | None) -> str:
        return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"

    for when, found in held_out.items():
        rate = found["acceptance_rate"]
        table.add_row(
            when,
            str(found["prompts"]),
            f"{found['tokens_per_step']:.2f}",
            between(found["tokens_per_step_interval"]),
            "" if rate is None else f"{rate:.3f}",
            between(found["acceptance_rate_interval"]),
            f"{found['tokens_per_second']:.1f}",
        )
    return table
