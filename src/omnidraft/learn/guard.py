"""The judge of learning: answers that are never trained on."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from omnidraft.learn.traces import Trace
from omnidraft.learn.trainer import Look, Trainer

_KEPT = 12  # answers held out
_LEAST = 4  # answers without which there is no judging
_EVERY = 4  # updates between two looks
_NOISE = 2.0  # standard errors
_PATIENCE = 5  # looks without a gain until learning pauses


class Guard:
    """Knows how well held-out answers were drafted by the best adapter so far, and by the newest.

    What it measures is agreement: the share of an answer's draft tokens that are the drafter's likeliest. The best
    adapter is the latest that was not worse than the one before; `paused` is set after some looks without a gain, and
    taken back when what is asked becomes harder to draft than it was. A head is compared with the best one so far, by
    its loss behind the same drafter.
    """

    def __init__(self) -> None:
        self.traces: deque[Trace] = deque(maxlen=_KEPT)
        self.best: dict[str, Any] = {}  # weights
        self.best_head: dict[str, Any] = {}
        self.agreement: float | None = None  # of the newest adapter, by the last look
        self.paused = False
        self._best: dict[Trace, float] = {}  # agreement under `best`
        self._anchor: dict[Trace, float] = {}  # the same, when something was last gained
        self._anchor_head: dict[str, Any] = {}
        self._updates = 0
        self._idle_looks = 0

    def begin(self, trainer: Trainer) -> None:
        """What the trainer has now is the best so far."""
        self.best = trainer.weights()
        self.best_head = self._anchor_head = trainer.head.weights()

    def keep(self, trace: Trace, trainer: Trainer | None) -> None:
        """Hold out one more answer. While paused, one that is drafted worse than the others is news; without a trainer
        to tell, any is."""
        if self.paused and trainer is None:
            self.paused = False
        elif self.paused and trainer:
            others = np.array(list(self._anchor.values()))
            self.paused = trainer.look(trace).agreement > others.mean() - _NOISE * others.std()
        self.traces.append(trace)

    def objects(self, trainer: Trainer) -> bool:
        """After an update: whether it, or those since the last look, made held-out answers worse beyond noise.

        Then the trainer has the best weights again, those of the drafter or of the head.
        """
        self._updates += 1
        traces = list(self.traces)  # while the background looks at them, a request may bring one more
        if self._updates % _EVERY or len(traces) < _LEAST:
            return False
        if not self._best:  # the first look: against the drafter as it came
            self._best = self._anchor = {
                trace: trainer.look(trace, adapted=False).agreement for trace in traces
            }
        looks = {trace: trainer.look(trace) for trace in traces}
        worse, gained = self._drafter_changed(trainer, looks)
        if trainer.training.head != "off" and not worse:
            worse, head_gained = self._head_changed(trainer, looks)
            gained |= head_gained
        self._idle_looks = 0 if gained else self._idle_looks + (not worse)
        self.paused = self._idle_looks >= _PATIENCE
        return worse

    def _drafter_changed(self, trainer: Trainer, looks: dict[Trace, Look]) -> tuple[bool, bool]:
        """Whether the adapter is worse than the best, and whether something was gained since that was last so."""
        now = {key: look.agreement for key, look in looks.items()}
        self.agreement = float(np.mean(list(now.values())))
        change, error = _change(self._best, now)
        if change < -_NOISE * error:
            trainer.load(self.best)
            trainer.forget_moments()
            return True, False
        if change >= 0:
            self.best, self._best = trainer.weights(), now
        gain, error = _change(self._anchor, now)
        if gained := gain > _NOISE * error:
            self._anchor = now
        return False, gained

    def _head_changed(self, trainer: Trainer, looks: dict[Trace, Look]) -> tuple[bool, bool]:
        """The same of the head."""
        head, seen = trainer.head, {key: look.examples for key, look in looks.items()}
        now = head.losses(seen)
        change, error = _change(now, head.losses(seen, self.best_head))
        if change < -_NOISE * error:
            head.load(self.best_head)
            trainer.forget_moments()
            return True, False
        if change >= 0:
            self.best_head = head.weights()
        gain, error = _change(now, head.losses(seen, self._anchor_head))
        if gained := gain > _NOISE * error:
            self._anchor_head = head.weights()
        return False, gained


def _change(before: dict[Trace, float], now: dict[Trace, float]) -> tuple[float, float]:
    """The mean change over the answers that both know, and its standard error; no change where they are too few."""
    both = [now[key] - before[key] for key in now.keys() & before.keys()]
    if len(both) < _LEAST:
        return 0.0, 0.0
    return float(np.mean(both)), float(np.std(both, ddof=1) / np.sqrt(len(both)))
