"""How much to draft: asked before each draft, told of each Step (DESIGN 5)."""

from __future__ import annotations

from typing import Protocol

from omnidraft.types import Step

_FADE = 0.9  # weight of what was known, against a new Step
_CLOSER = 1.03  # another length must promise this much more to be taken
_PROBES = (8, 80)  # plain steps between two probes: at first, and at most


class Control(Protocol):
    """A policy. It may look at anything known before the draft, never at the draft."""

    def length(self) -> int:
        """Draft tokens of the next step; 0 decodes plainly."""

    def saw(self, step: Step, first: bool) -> None:
        """Learn from a Step; the `first` of an answer has the prompt's pass in it."""


class Fixed:
    """Always k."""

    def __init__(self, k: int) -> None:
        self._k = k

    def length(self) -> int:
        """See `Control`."""
        return self._k

    def saw(self, step: Step, first: bool) -> None:
        """See `Control`."""


class Adaptive:
    """The length that promises most tokens a second, 0 included, from what passes and drafts have cost so far.

    A step of length k costs k draft tokens, a pass over the proposal and the rest. What it brings is 1 + a + a^2 + ...,
    where a is the chance that a proposed token is accepted given that those before it were. Two lengths are tried
    first; a pass longer than any that was seen counts like the longest, until it is seen. Where drafting does not pay,
    a single token is drafted now and then, after more and more plain steps, and more at once when it is accepted.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._tries = [0, min(4, longest)]
        self._now = 0
        self._passes: dict[int, float] = {}  # tokens of a pass -> seconds
        self._draft = 0.0  # seconds a draft token
        self._rest = 0.0  # seconds a step outside the models, when drafting
        self._ratio = 1.0  # proposed target tokens a draft token
        self._accepted, self._rejected = 1.0, 1.0  # fading counts
        self._plain = 0  # steps since something was drafted
        self._patience = _PROBES[0]
        self._probe = 1

    def length(self) -> int:
        """See `Control`."""
        if self._tries:
            return self._tries[0]
        if self._now == 0 and self._plain >= self._patience:
            return min(self._probe, self._longest)
        return self._now

    def saw(self, step: Step, first: bool) -> None:
        """See `Control`."""
        drafted, proposed = len(step.draft.tokens), len(step.proposal.tokens)
        probed = self._now == 0 and drafted > 0 and not self._tries
        behind = self._plain  # tokens that the drafter has to catch up with before it can draft
        self._plain = 0 if drafted else self._plain + 1
        if proposed:
            fade = _FADE**4 if probed else _FADE  # what was counted before the plain steps is old by now
            self._accepted = fade * self._accepted + step.accepted
            self._rejected = fade * self._rejected + (step.accepted < proposed)
        if first:
            return
        self._passes[proposed + 1] = self._blend(self._passes.get(proposed + 1), step.verify_seconds)
        if drafted:
            rest = step.seconds - step.draft_seconds - step.verify_seconds
            if not behind or not self._draft:
                self._draft = self._blend(self._draft or None, step.draft_seconds / drafted)
            self._rest = self._blend(self._rest or None, rest)
            self._ratio = self._blend(self._ratio, proposed / drafted)
        if self._tries:
            del self._tries[0]
            if self._tries:
                return
        self._choose()
        if self._now:
            self._probe, self._patience = 1, _PROBES[0]
        elif probed and step.accepted == proposed:  # a longer one at once
            self._probe, self._plain = 2 * self._probe, self._patience
        elif probed:
            self._probe, self._patience = 1, min(2 * self._patience, _PROBES[1])

    def _choose(self) -> None:
        promised = {k: self.promise(k) for k in range(self._longest + 1)}
        best = max(promised, key=lambda k: promised[k])
        if promised[best] > _CLOSER * promised[self._now]:
            self._now = best

    def promise(self, k: int) -> float:
        """Tokens a second at length k."""
        chance = self._accepted / (self._accepted + self._rejected)
        proposed = k * self._ratio
        whole = int(proposed)
        tokens = 1 + sum(chance**i for i in range(1, whole + 1)) + (proposed - whole) * chance ** (whole + 1)
        seconds = self._pass(1 + proposed) + k * self._draft + (self._rest if k else 0.0)
        return tokens / max(seconds, 1e-9)

    def _pass(self, tokens: float) -> float:
        """Seconds of a pass, between those that were seen."""
        known = sorted(self._passes)
        below = max((m for m in known if m <= tokens), default=known[0])
        above = min((m for m in known if m >= tokens), default=known[-1])
        if below >= above:
            return self._passes[below]
        share = (tokens - below) / (above - below)
        return (1 - share) * self._passes[below] + share * self._passes[above]

    @staticmethod
    def _blend(known: float | None, seen: float) -> float:
        return seen if known is None else _FADE * known + (1 - _FADE) * seen
