"""Experiments of adaptive drafting: a head that ends drafts, trained with the drafter or without it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omnidraft.experiments import markdown, statistics, steptimes
from omnidraft.experiments.experiment import Cell, Claim, Experiment, Measured, Verdict
from omnidraft.experiments.lab import Lab
from omnidraft.experiments.learning import DIRECT, setting, tested, with_head
from omnidraft.experiments.results import Results
from omnidraft.experiments.scales import Scale, Weights

_HEADS = {
    "adapt only": "only",
    "joint": "joint",
    "interleaved": "interleaved",
}  # row -> how the head is trained


class Adaptive(Experiment):
    """Rows are `SpD` (a fixed k), `adapt only` (the head alone learns), `distill only`, `joint` and `interleaved`."""

    told: Mapping[str, Sequence[str]]  # row -> the paper's words for each task
    method = DIRECT
    loss = "direct"

    @abstractmethod
    def pair(self, scale: Scale) -> tuple[str, str]:
        """Drafter and target."""

    @abstractmethod
    def weights(self, scale: Scale) -> Weights:
        """Which weights are trained."""

    @property
    def claims(self) -> Sequence[Claim]:
        """Of which of both trainings is the faster one."""
        return (Claim(f"Interleaved training is faster than joint ({self.title}).", _interleaved),)

    def cells(self, scale: Scale) -> Iterator[Cell]:
        """See `Experiment`."""
        drafter, target = self.pair(scale)
        for place, task in enumerate(scale.tasks):
            for row in self.told:
                loss = None if row == "SpD" else self.loss
                cell = setting(
                    scale,
                    task,
                    self.method,
                    loss,
                    weights=self.weights(scale),
                    drafter=drafter,
                    target=target,
                )
                if row in _HEADS:
                    cell = with_head(scale, cell, _HEADS[row])
                yield cell | dict(row=row, place=place)

    def run(self, lab: Lab, cell: Cell) -> Measured:
        """See `Experiment`."""
        return tested(lab, cell)

    def report(self, results: Results) -> str:
        """See `Experiment`."""

        def paper(said: dict[str, Any]) -> str:
            words = self.told.get(said["row"], ())
            return words[said["place"]] if said["place"] < len(words) else ""

        shown = markdown.decoding(
            results, ("target", "drafter", "task", "row", "k", "place"), paper, drafted=True
        )
        return (
            f"{shown}\n\nRows with a head draft up to twice k, and stop where "
            "1 - P(all accepted) is above 0.7, or 0.3 for text."
        )


def _interleaved(results: Results) -> tuple[Verdict, str] | None:
    """By the time that tokens take: tokens a step alone would not do, for drafts differ in length."""
    table8 = results.of("table8")
    upper: list[float] = []
    lower: list[float] = []
    for (target, drafter, task), _ in results.groups("target", "drafter", "task"):
        its = steptimes.costs(table8, target, drafter)
        sides = [
            results.find(target=target, drafter=drafter, task=task, row=row)
            for row in ("interleaved", "joint")
        ]
        if its and all(sides):
            times = [sum(map(sum, zip(*(its.of(run) for run in side), strict=True))) for side in sides]
            upper.append(times[1] / len(sides[1]))
            lower.append(times[0] / len(sides[0]))
    if not upper:
        return None
    found = statistics.share(upper, lower)
    return statistics.above(
        found, statistics.exactly(1)
    ), f"{found.text()} times joint's speed, over {len(upper)} tasks"
