"""The command that runs experiments."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from omnidraft.cli.common import err, out
from omnidraft.errors import OptionError

if TYPE_CHECKING:
    from omnidraft.experiments.experiment import Experiment
    from omnidraft.experiments.scales import Scale, StepTimes

_TIMES = "draft token, target pass, recorded token, answer trained on"


def experiment(
    name: Annotated[
        str,
        typer.Argument(
            help="An experiment; list shows them all, render writes docs/results.md and its pictures, "
            "data fetches the paper's data sets from the hub."
        ),
    ],
    scale: Annotated[str, typer.Option(help="laptop, or the paper's models and data.")] = "laptop",
    seeds: Annotated[int | None, typer.Option(help="How many; the scale's if not said.")] = None,
    prompts: Annotated[int | None, typer.Option(help="That judge, a task; the scale's if not said.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the cells that are finished.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few prompts of a few tokens, in minutes; nothing is kept.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run and how long it takes.")
    ] = False,
    step_times: Annotated[
        str | None, typer.Option(help=f"For list and --dry-run, ms, separated by commas: {_TIMES}.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: the cells of that setting; may be repeated.")
    ] = None,
    drafter: Annotated[str | None, typer.Option("--drafter", "-d", help="Instead of the scale's.")] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="Instead of the scale's.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the task data.")] = Path("../shared/data"),
    folder: Annotated[Path, typer.Option(help="Where the experiments are.")] = Path("experiments"),
    results: Annotated[
        Path | None, typer.Option(help="Folder of the results: results, or results/paper.")
    ] = None,
) -> None:
    """Run a table or figure of the paper, or one of our own; cells that are finished are kept."""
    from omnidraft.experiments import experiment as experiments
    from omnidraft.experiments.scales import scale_named

    chosen = _scale(scale_named(scale), seeds, prompts, quick, drafter, target)
    where = results or (Path("results") if scale == "laptop" else Path("results") / scale)
    if name == "list":
        _list(folder, chosen, _times(step_times, chosen), where)
    elif name == "render":
        from omnidraft.experiments.render import write

        for file in write(folder, where):
            out.print(str(file))
    elif name == "data":
        from omnidraft.experiments.hubdata import fetch

        for file in fetch(data):
            out.print(str(file))
    elif dry_run:
        _foretell(experiments.load(folder, name), chosen, _times(step_times, chosen), only)
    else:
        found = experiments.load(folder, name)
        if quick:
            with tempfile.TemporaryDirectory() as place:
                _run(found, chosen, data, Path(place) / f"{name}.json", only, resume)
        else:
            _run(found, chosen, data, where / f"{name}.json", only, resume)


def _scale(
    scale: Scale, seeds: int | None, prompts: int | None, quick: bool, drafter: str | None, target: str | None
) -> Scale:
    if seeds is not None:
        if seeds < 1:
            raise OptionError(f"seeds is {seeds}; it must be 1 or more")
        scale = replace(scale, seeds=seeds)
    if prompts is not None:
        if prompts < 1:
            raise OptionError(f"prompts is {prompts}; it must be 1 or more")
        scale = replace(scale, prompts=prompts, graded=prompts, test=dict.fromkeys(scale.test, prompts))
    if drafter:
        scale = replace(scale, drafter=drafter)
    if target:
        scale = replace(scale, targets=(target,), scaling=(target,))
    return scale.quick() if quick else scale


def _cells(found: Experiment, scale: Scale, only: list[str] | None) -> list[dict[str, Any]]:
    from omnidraft.experiments.experiment import all_cells

    cells = all_cells(found, scale, scale.seeds)
    for condition in only or ():
        key, equals, value = condition.partition("=")
        if not equals or not any(key in cell for cell in cells):
            known = sorted({name for cell in cells for name in cell})
            raise OptionError(f"--only {condition} is not KEY=VALUE with a key of {', '.join(known)}")
        cells = [cell for cell in cells if str(cell.get(key)) == value]
    if not cells:
        raise OptionError(
            f"no cell is left by --only {', '.join(only or ())}; see --dry-run for what there is"
        )
    return cells


def _run(
    found: Experiment, scale: Scale, data: Path, path: Path, only: list[str] | None, resume: bool
) -> None:
    from omnidraft.experiments.lab import Lab
    from omnidraft.experiments.render import told
    from omnidraft.experiments.results import Results
    from omnidraft.experiments.runner import run

    cells = _cells(found, scale, only)
    results = Results(path)
    if len(results) and not resume:
        raise OptionError(
            f"{path} has {len(results)} finished cells; add --resume to go on with them, or move it away"
        )
    done = sum(cell in results for cell in cells)

    def report(cell: dict[str, Any], seconds: float) -> None:
        nonlocal done
        done += 1
        err.print(f"cell {done} of {len(cells)}, {seconds:.0f} s: {_told(cell)}", markup=False)

    run(
        found,
        Lab(scale, data, say=lambda text: err.print(text, markup=False)),
        cells,
        results,
        on_cell=report,
    )
    out.print(f"## {found.title}\n\n{told(found, results)}", markup=False)


def _list(folder: Path, scale: Scale, times: StepTimes, where: Path) -> None:
    from omnidraft.experiments import experiment as experiments
    from omnidraft.experiments.results import Results
    from omnidraft.experiments.runner import foretold
    from omnidraft.experiments.units import duration

    table = Table("name", "what", "finished", "takes about", box=None, pad_edge=False)
    suite = []
    for name in experiments.names(folder):
        found = experiments.load(folder, name)
        own = [(found, cell) for cell in _cells(found, scale, None)]
        results = Results(where / f"{name}.json")
        finished = sum(cell in results for _, cell in own)
        table.add_row(name, found.title, f"{finished} of {len(own)}", duration(foretold(own, times)))
        suite += own
    table.add_row("", "all, each stream recorded once", "", duration(foretold(suite, times)))
    out.print(table)


def _foretell(found: Experiment, scale: Scale, times: StepTimes, only: list[str] | None) -> None:
    from omnidraft.experiments.runner import foretold, recording, streams
    from omnidraft.experiments.units import duration

    cells = [(found, cell) for cell in _cells(found, scale, only)]
    out.print(f"{found.title}, scale {scale.name}: {len(cells)} cells", markup=False)
    for stream in streams(cells):
        out.print(
            f"record {stream.answers} answers of {stream.tokens} tokens: {stream.target} on {stream.task} "
            f"({stream.split}), spelled for {stream.drafter}: {duration(recording(stream, times))}",
            markup=False,
        )
    for _, cell in cells:
        out.print(f"run {_told(cell)}: {duration(found.seconds(cell, times))}", markup=False)
    out.print(f"in all about {duration(foretold(cells, times))}")


def _times(given: str | None, scale: Scale) -> StepTimes:
    from omnidraft.experiments.scales import StepTimes

    if given is None:
        return scale.times
    try:
        draft, target, record, train = (float(value) for value in given.split(","))
    except ValueError as error:
        raise OptionError(f"step-times is {given!r}; give four numbers: {_TIMES}") from error
    return StepTimes(draft, target, record, train)


def _told(cell: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in cell.items())
