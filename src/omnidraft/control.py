"""What to draft with, and how much: asked before each draft, told of each Step (DESIGN 5)."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omnidraft.types import Source, Step

Floats = NDArray[np.floating[Any]]
Choice = tuple[Source, int]  # what the next step drafts with, and how many tokens at most; 0 decodes plainly

_LATEST = 15  # times of a kind whose median is its cost
_FORGET = 300  # steps after which a pass is timed anew: another process may have come or gone
_FADE = 0.97  # weight of what was counted, against a new proposal
_SURPRISE = (
    0.05  # a run of proposals that had a smaller chance halves what was counted: another phase has begun
)
_ALIKE = 3  # proposals that must have reached a position to weigh as much as the position before
_CLOSER = 1.03  # another length must promise this much more to be taken
_JUDGED = 2  # steps, of as many draft tokens, before a drafter is judged
_CHEAP, _PATIENT = (
    0.3,
    8,
)  # where such a step costs less than so many plain passes more than one: so many steps
_SHARE, _DRAFTER_SHARE = 0.005, 0.015  # of the time, that trying a way may cost
_SAVED = 4  # plain passes whose time is saved up for it at most
_REST = 8  # steps from a try that was rejected to the next
_HORIZON = 100  # tokens over which a drafter that is behind pays for catching up
_LONG_ENOUGH = 8  # tokens of a match that comes before the drafter, where nothing is measured


class Control(Protocol):
    """A policy. It may look at anything known before the draft, never at the draft."""

    def choose(self, room: int, matched: int, behind: int) -> Choice:
        """For the next step, which drafts at most `room` tokens.

        `matched`: how many of the context's last tokens a look-up has found again (`Lookup.match`); `behind`: how many
        tokens of the context the drafter has not seen.
        """

    def saw(self, step: Step, first: bool) -> None:
        """Learn from a Step; the `first` of an answer has the prompt's pass in it."""


class Fixed:
    """Always k: by a look-up whose match is long enough, else by the drafter."""

    def __init__(self, k: int, long_enough: int = _LONG_ENOUGH) -> None:
        self._k = k
        self._long_enough = long_enough

    def choose(self, room: int, matched: int, behind: int) -> Choice:
        """See `Control`."""
        return "lookup" if matched >= self._long_enough else "drafted", min(self._k, room)

    def saw(self, step: Step, first: bool) -> None:
        """See `Control`."""


class Adaptive:
    """The source and length that promise most tokens a second, 0 included, by what steps have cost and brought.

    A step of length k costs k draft tokens, a pass over the proposal and the rest. What it brings is 1 + a1 + a1 a2 +
    ..., where a_i is the chance that the i-th proposed token is accepted if those before it were. Look-ups are told
    apart by how long their match is. A pass longer than any that was seen counts like the longest, until it is seen.
    What promises less is tried now and then, as often as a small share of the time allows: plain steps, a token of
    the other sources, and more while it is accepted, and a token more or less of the best one.
    """

    def __init__(self, drafted: int, lookup: int) -> None:
        """How many tokens each source drafts at most; 0 where there is none."""
        self._plain = _Way(0)
        self._drafter = _Way(drafted, tries=_PATIENT, share=_DRAFTER_SHARE) if drafted else None
        self._lookup = lookup
        self._lookups: dict[int, _Way] = {}  # by the bits of the match's length
        self._passes: defaultdict[int, _Middle] = defaultdict(_Middle)  # by tokens of a pass
        self._seen: dict[int, int] = {}  # in which step a pass of so many tokens was last
        self._steps = 0
        self._ways: list[_Way] = []  # that the step under way could take
        self._way = self._plain  # which it took
        self._asked = 0  # and how many draft tokens
        self._next_try = 0  # the step
        self._tried_at = 0.0  # tokens a second that another way or length promised; 0: it is the best
        self._behind = 0
        self._more = 1  # whether a token more or less of the best way is tried next

    def choose(self, room: int, matched: int, behind: int) -> Choice:
        """See `Control`."""
        self._behind, self._tried_at = behind, 0.0
        self._ways = [self._plain, *([self._drafter] if self._drafter else [])]
        if matched and self._lookup:
            bits = min(matched, 16).bit_length()
            self._ways.append(self._lookups.setdefault(bits, _Way(self._lookup)))
        self._way, k = self._choose() if 1 in self._passes else (self._plain, 0)
        self._asked = min(k, room)
        return "drafted" if self._way in (self._plain, self._drafter) else "lookup", self._asked

    def _choose(self) -> tuple[_Way, int]:
        if self._drafter and self._untried(self._drafter):
            return self._drafter, min(_JUDGED, self._drafter.longest)
        best, rate = self._plain, 0.0
        for way in self._ways:
            promised = self._promises(way)
            likeliest = int(promised.argmax())
            if promised[likeliest] > _CLOSER * promised[way.k]:
                way.k = likeliest
            if promised[way.k] > rate:
                best, rate = way, float(promised[way.k])
        for way in self._ways:
            k = min(max(1, way.k + self._more) if way is best else way.k or way.probe, way.longest)
            if way is best and k == way.k:
                self._more = -self._more
                continue
            way.price = self._price(way, k, rate)
            if way.price <= way.credit and self._steps >= self._next_try:
                way.credit -= way.price
                self._more, self._tried_at = -self._more, rate
                return way, k
        return best, best.k

    def _untried(self, drafter: _Way) -> bool:
        """Whether it is still to be judged: the first words of an answer are hard to draft, and may mislead."""
        if drafter.tries <= _PATIENT - _JUDGED:
            plain = self._passes[1].value
            return drafter.tries > 0 and self._price(drafter, _JUDGED, 1 / plain) < _CHEAP * plain
        return True

    def _price(self, way: _Way, k: int, rate: float) -> float:
        """Seconds that a step costs more than its only token would at this rate, if nothing is accepted."""
        catching_up = way.catch_up.value * self._late(way)
        return float(self._seconds(way, np.array([k]))[0]) + catching_up - 1 / rate

    def saw(self, step: Step, first: bool) -> None:
        """See `Control`."""
        proposed = len(step.proposal.tokens)
        self._steps += 1
        self._way.count(min(len(step.tokens), proposed), step.accepted)
        self._way.cost(step, self._asked, self._late(self._way))
        if first:
            return
        self._passes[proposed + 1].add(max(step.verify_seconds, 1e-9))  # what takes no time has no rate
        self._seen[proposed + 1] = self._steps
        for tokens, seen in list(self._seen.items()):
            if self._steps - seen > _FORGET:
                del self._passes[tokens], self._seen[tokens]
        if self._tried_at:
            self._way.credit += (len(step.tokens) - 1) / self._tried_at
            self._next_try = self._steps + (0 if 0 < proposed == step.accepted else _REST)
        # Looked up by `in` first: asking for a pass alone would make it known.
        plain = self._passes[1].value if 1 in self._passes else 0.0
        for way in self._ways:
            most = max(way.price, _SAVED * plain)
            way.credit = min(way.credit + way.share * step.seconds, most)

    def _late(self, way: _Way) -> int:
        """How many tokens more than after a step of its own the drafter has to catch up with."""
        return self._behind if way is self._drafter and self._behind > way.longest + 1 else 0

    def _promises(self, way: _Way) -> Floats:
        """Tokens a second at each length. [longest + 1]"""
        k = np.arange(way.longest + 1)
        tokens = way.tokens(k)
        late = np.where(k > 0, way.catch_up.value * self._late(way) * tokens / _HORIZON, 0)
        promised: Floats = tokens / (self._seconds(way, k) + late)
        return promised

    def _seconds(self, way: _Way, k: NDArray[np.integer]) -> Floats:
        """Of a step at each length, catching up left out."""
        known = sorted(self._passes)
        seconds: Floats = np.interp(1 + way.ratio * k, known, [self._passes[m].value for m in known])
        return seconds + way.draft.value * k + np.where(k > 0, way.rest.value, 0)

    def as_dict(self) -> dict[str, Any]:
        """What it knows, in the form that `--json` prints. Milliseconds; positions of a proposal from the first."""
        ways = {f"lookup_{1 << bits - 1}": way for bits, way in sorted(self._lookups.items())}
        if self._drafter:
            ways = {"drafter": self._drafter} | ways
        return {
            "pass_ms": {str(m): 1000 * middle.value for m, middle in sorted(self._passes.items())},
            **{name: way.as_dict() for name, way in ways.items()},
        }


class _Way:
    """What is known of one way to draft: how far its proposals are accepted, and what they cost."""

    def __init__(self, longest: int, *, tries: int = 0, share: float = _SHARE) -> None:
        self.longest = longest
        self.tries = tries  # steps left before it is judged
        self.share = share
        self.credit = 0.0  # seconds that trying it may cost now
        self.price = 0.0  # seconds that trying it costs
        self.k = 0  # the best length when last asked
        self.probe = 1  # draft tokens when it is tried though it does not seem to pay
        self.ratio = 1.0  # proposed target tokens a draft token that was asked for
        self.draft = _Middle()  # seconds a draft token that was asked for
        self.catch_up = _Middle()  # seconds a token of context that the drafter has not seen
        self.rest = _Middle()  # seconds a step outside the models
        self._reached = np.zeros(2 * longest)  # fading counts by position of the proposal
        self._accepted = np.zeros(2 * longest)
        self._lucky = True  # whether the last proposals were accepted
        self._luck = 1.0  # how likely it was that so many in a row are

    def count(self, reached: int, accepted: int) -> None:
        """A proposal of which the target looked at so many tokens."""
        if not reached:
            return
        self.probe = min(2 * self.probe, self.longest) if accepted == reached else 1
        luck = float(self.chances()[0]) if accepted else 1 - float(self.chances()[0])
        self._luck = self._luck * luck if (accepted > 0) == self._lucky else luck
        self._lucky = accepted > 0
        fade = _FADE
        if self._luck < _SURPRISE:  # another phase has begun, and what was counted is of the last one
            fade, self._luck = 0.5, 1.0
        self._reached *= fade
        self._accepted *= fade
        self._reached[:reached] += 1
        self._accepted[:accepted] += 1

    def cost(self, step: Step, asked: int, late: int) -> None:
        """What a Step took; `asked`: draft tokens, of which an acceptance head may have left some unwritten; `late`:
        tokens that the drafter had to catch up with in it."""
        self.tries = max(0, self.tries - 1)
        self.rest.add(step.seconds - step.draft_seconds - step.verify_seconds)
        if not step.draft.tokens:
            return
        self.ratio += (len(step.proposal.tokens) / asked - self.ratio) / _LATEST
        if late:
            self.catch_up.add(max(0.0, step.draft_seconds - self.draft.value * asked) / late)
        else:
            self.draft.add(step.draft_seconds / asked)

    def chances(self) -> Floats:
        """That a position is accepted if those before it were; where little was seen, about as the one before."""
        chances = np.empty(len(self._reached))
        chance, weight = 0.5, 0.5
        for i, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            chances[i] = chance = (accepted + weight * chance) / (reached + weight)
            weight = _ALIKE
        return chances

    def tokens(self, k: NDArray[np.integer]) -> Floats:
        """Of a step at each length, to be expected."""
        expected = 1 + np.append(0, self.chances().cumprod().cumsum())
        tokens: Floats = np.interp(self.ratio * k, np.arange(len(expected)), expected)
        return tokens

    def as_dict(self) -> dict[str, Any]:
        """See `Adaptive.as_dict`."""
        return {
            "k": self.k,
            "acceptance_by_position": self.chances()[: self.longest].tolist(),
            "draft_ms": 1000 * self.draft.value,
            "other_ms": 1000 * self.rest.value,
        }


class _Middle:
    """The median of the latest times: what some other process did to one of them does not count.

    Nor does the first, once there is another: engines prepare what they do for the first time.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._prepared = False
        self.value = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        if len(self._latest) == 1 and not self._prepared:
            self._latest.clear()
            self._prepared = True
        self._latest.append(seconds)
        self.value = sorted(self._latest)[len(self._latest) // 2]
