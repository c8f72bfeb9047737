"""Running an experiment's cells, and foretelling how long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter

from omnidraft.experiments.experiment import Cell, Experiment, Stream
from omnidraft.experiments.lab import Lab
from omnidraft.experiments.results import Results
from omnidraft.experiments.scales import StepTimes
from omnidraft.provenance import provenance


def run(
    experiment: Experiment,
    lab: Lab,
    cells: Sequence[Cell],
    results: Results,
    *,
    on_cell: Callable[[Cell, float], None] = lambda cell, seconds: None,
) -> None:
    """Measure the cells that are not finished yet; each is kept as soon as it is."""
    born = provenance()
    for cell in cells:
        if cell in results:
            continue
        start = perf_counter()
        for stream in experiment.streams(cell):
            lab.stream(stream)
        measured = experiment.run(lab, cell)
        seconds = perf_counter() - start
        results.add(cell, measured, seconds, born)
        on_cell(cell, seconds)


def streams(cells: Iterable[tuple[Experiment, Cell]]) -> list[Stream]:
    """The recorded answers that cells need, each stream once at its longest."""
    longest: dict[Stream, Stream] = {}
    for experiment, cell in cells:
        for stream in experiment.streams(cell):
            key = replace(stream, answers=0)
            if key not in longest or longest[key].answers < stream.answers:
                longest[key] = stream
    return list(longest.values())


def recording(stream: Stream, times: StepTimes) -> float:
    """About how long a stream takes to record, seconds."""
    return stream.answers * stream.tokens * times.record / 1000


def foretold(cells: Sequence[tuple[Experiment, Cell]], times: StepTimes) -> float:
    """About how long cells take with nothing recorded yet, seconds."""
    recorded = sum(recording(stream, times) for stream in streams(cells))
    return recorded + sum(experiment.seconds(cell, times) for experiment, cell in cells)
