"""Experiments that look at what targets answered, and run no drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from omnidraft.experiments.experiment import Cell, Experiment
from omnidraft.experiments.scales import Scale

if TYPE_CHECKING:
    from omnidraft.experiments.lab import Lab


class OfAnswers(Experiment):
    """Looks at the training stream of each target and task."""

    apart = ("drafter",)

    def cells(self, scale: Scale) -> Iterator[Cell]:
        """See `Experiment`."""
        for target in scale.targets:
            for task in scale.tasks:
                size = dict(train=scale.train[task], tokens=scale.tokens)
                yield dict(target=target, drafter=scale.drafter, task=task, **size)

    def answers(self, lab: Lab, cell: Cell) -> list[Sequence[int]]:
        """The stream's answers in target tokens."""
        [stream] = self.streams(cell)
        return [one.answer for one in lab.stream(stream)]
