"""Experiments along a stream: each answer decoded before it is learned from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from omnidraft.experiments import markdown, statistics
from omnidraft.experiments.experiment import Cell, Experiment, Measured
from omnidraft.experiments.lab import Lab, Pair
from omnidraft.experiments.learning import Learned, learn, shuffled, training_of
from omnidraft.experiments.replay import Replay, by_prompt
from omnidraft.experiments.results import Results
from omnidraft.learn.record import Recorded

_POINTS = 10  # of a curve


class Curve(Experiment):
    """Cells are of `omnidraft.experiments.learning.setting`, with `watch` and `batch`, and `row`, their name."""

    parts = 5  # of the stream, in the table

    def legs(self, lab: Lab, cell: Cell) -> list[tuple[Pair, Sequence[Recorded]]]:
        """The stream, leg by leg: of each task in turn."""
        pair = lab.pair(cell["target"], cell["drafter"])
        return [
            (pair, shuffled(lab.stream(stream), cell.get("seed", 0)))
            for stream in self.streams(cell)
            if stream.split == "train"
        ]

    def run(self, lab: Lab, cell: Cell) -> Measured:
        """See `Experiment`."""
        return watched(lab, cell, self.legs(lab, cell))

    def report(self, results: Results) -> str:
        """Acceptance in each part of the stream."""
        rows = []
        for values, runs in results.groups("target", "task", "row"):
            told = [statistics.acceptance(own).text(".3f") for own in parted(runs, self.parts)]
            rows.append((*values, len(runs), len(runs[0]["at"]), *told))
        which = [f"{i + 1} of {self.parts}" for i in range(self.parts)]
        head = ("target", "task", "row", "seeds", "answers decoded", *which)
        return f"{markdown.table(head, rows)}\n\nAcceptance in each part of the stream, before it was learned from."

    def draw(self, results: Results, axes: Any) -> bool:
        """See `Experiment`."""
        for (task, row), runs in results.groups("task", "row"):
            own = parted(runs, _POINTS)
            found = [statistics.acceptance(some) for some in own]
            at = [some[0]["at"][len(some[0]["at"]) // 2] for some in own]
            axes.plot(at, [one.value for one in found], label=f"{task}, {row}")
            axes.fill_between(at, [one.low for one in found], [one.high for one in found], alpha=0.12)
        axes.set(xlabel="answers learned from", ylabel="acceptance")
        return True


def parted(runs: Sequence[Measured], count: int) -> list[list[Measured]]:
    """What was watched, in so many parts of like length, or fewer: each has an answer."""
    answers = len(runs[0]["at"])
    count = min(count, answers)
    edges = [answers * i // count for i in range(count + 1)]
    return [
        [{name: values[low:high] for name, values in run.items()} for run in runs]
        for low, high in pairwise(edges)
    ]


def watched(lab: Lab, cell: Cell, legs: Sequence[tuple[Pair, Sequence[Recorded]]]) -> Measured:
    """The first `watch` answers of every batch of the legs, decoded before they are learned from.

    `at`: where in the stream each answer stands. A cell without `loss` does not learn.
    """
    pair = legs[0][0]
    answers = [one for _, own in legs for one in own]
    replay = Replay(pair.lexicon, cell["method"], cell["k"])
    results: list[Measured] = []

    def watch(start: int, its: Learned) -> None:
        batch = answers[start : start + cell["batch"]]
        replay.stop = its.stop(cell.get("gamma", 1.0))
        found = pair.measure(batch[: cell["watch"]], {"": replay}, its.drafter)[""]
        for i, values in enumerate(zip(*found.values(), strict=True)):
            results.append(dict(zip(found, values, strict=True)) | {"at": start + i})
        replay.know(batch)

    if cell["loss"]:
        learn(lab, pair, answers, training_of(cell), watch=watch)
    else:
        for start in range(0, len(answers) - cell["batch"] + 1, cell["batch"]):
            watch(start, Learned(None))
    return by_prompt(results)
