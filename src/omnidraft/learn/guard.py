"""The judge of learning: answers that are never trained on."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from omnidraft.learn.traces import Trace
from omnidraft.learn.trainer import Trainer

_KEPT = 12  # answers held out
_LEAST = 4  # answers without which there is no judging
_EVERY = 4  # updates between two looks
_NOISE = 2.0  # standard errors
_PATIENCE = 5  # looks without a gain until learning pauses


class Guard:
    """Knows how well held-out answers were drafted by the best adapter so far, and by the newest.

    What it measures is agreement: the share of an answer's draft tokens that are the drafter's likeliest. The best
    adapter is the latest that was not worse than the one before; `paused` is set after some looks without a gain, and
    taken back when what is asked becomes harder to draft than it was.
    """

    def __init__(self) -> None:
        self.traces: deque[Trace] = deque(maxlen=_KEPT)
        self.best: dict[str, Any] = {}  # weights
        self.agreement: float | None = None  # of the newest adapter, by the last look
        self.paused = False
        self._best: dict[int, float] = {}  # id of a trace -> its agreement under `best`
        self._anchor: dict[int, float] = {}  # the same, when something was last gained
        self._updates = 0
        self._idle_looks = 0

    def keep(self, trace: Trace, trainer: Trainer | None) -> None:
        """Hold out one more answer. While paused, one that is drafted worse than the others is news; without a trainer
        to tell, any is."""
        if self.paused and trainer is None:
            self.paused = False
        elif self.paused and trainer:
            others = np.array(list(self._anchor.values()))
            self.paused = agreement(trainer, trace) > others.mean() - _NOISE * others.std()
        self.traces.append(trace)

    def objects(self, trainer: Trainer) -> bool:
        """After an update: whether it, or those since the last look, made held-out answers worse beyond noise."""
        self._updates += 1
        if self._updates % _EVERY or len(self.traces) < _LEAST:
            return False
        if not self._best:  # the first look: against the drafter as it came
            self._best = self._anchor = {id(t): agreement(trainer, t, adapted=False) for t in self.traces}
        now = {id(trace): agreement(trainer, trace) for trace in self.traces}
        self.agreement = float(np.mean(list(now.values())))
        change, error = _change(self._best, now)
        if change < -_NOISE * error:
            return True
        if change >= 0:
            self.best, self._best = trainer.weights(), now
        gain, error = _change(self._anchor, now)
        if gain > _NOISE * error:
            self._anchor, self._idle_looks = now, 0
        else:
            self._idle_looks += 1
        self.paused = self._idle_looks >= _PATIENCE
        return False


def _change(before: dict[int, float], now: dict[int, float]) -> tuple[float, float]:
    """The mean change over the answers that both know, and its standard error; no change where they are too few."""
    both = [now[key] - before[key] for key in now.keys() & before.keys()]
    if len(both) < _LEAST:
        return 0.0, 0.0
    return float(np.mean(both)), float(np.std(both, ddof=1) / np.sqrt(len(both)))


def agreement(trainer: Trainer, trace: Trace, *, adapted: bool = True) -> float:
    """The share of an answer's draft tokens that the drafter would have drafted itself, each given those before."""
    trace = trace.tail(trainer.training.length)
    likeliest = trainer.likeliest(trace, adapted=adapted)
    return float(np.mean(likeliest == trace.tokens[int(trace.prompt[0]) :]))
