"""Logits to tokens: the law in force at a position, and the one draw from it."""

from __future__ import annotations

import hashlib
import math
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnidraft.errors import InvalidLogitsError, OmniDraftError, OptionError, is_count, is_number
from omnidraft.types import Row

_TEMPERATURES = 1e-6, 1e6  # logits divided by less, or by more, leave the range of float32
_REPETITION_PENALTIES = 1e-3, 1e3  # the same
_MOST_ADDED = 1e6  # the same


class Processor(Protocol):
    """Changes the target's logits before the law is taken: a grammar, a logits processor of transformers.

    Called once per position with the prompt and the answer so far, which only ever grows by accepted tokens: a
    processor with a state advances it by what is new. The row must not be changed in place.
    """

    def __call__(self, tokens: Sequence[int], row: Row) -> Row: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the meanings and the order are those of transformers.

    temperature: 0 takes the most likely token. top_k: 0 keeps all. top_p, min_p: 1 and 0 keep all.
    repetition_penalty: divides the logits of tokens seen in prompt or answer (CTRL); presence_penalty:
    subtracted from those of tokens in the answer, frequency_penalty once for each time they are there.
    seed: None draws a fresh one.

    Raises:
        OptionError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, must: str) -> None:
            if not ok:
                raise OptionError(f"{name} is {getattr(self, name)!r}; it must be {must}")

        warm, low, high = self.temperature, *_TEMPERATURES
        check(
            is_number(warm) and (warm == 0 or low <= warm <= high),
            "temperature",
            f"a number: 0, or from {low:g} to {high:g}",
        )
        check(is_count(self.top_k) and self.top_k >= 0, "top_k", "an integer, 0 (all) or more")
        check(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0, at most 1")
        check(is_number(self.min_p) and 0 <= self.min_p < 1, "min_p", "a number, at least 0, below 1")
        penalty = self.repetition_penalty
        low, high = _REPETITION_PENALTIES
        check(
            is_number(penalty) and low <= penalty <= high,
            "repetition_penalty",
            f"a number from {low:g} to {high:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            added = getattr(self, name)
            check(
                is_number(added) and abs(added) <= _MOST_ADDED,
                name,
                f"a number from {-_MOST_ADDED:g} to {_MOST_ADDED:g}",
            )
        check(self.seed is None or (is_count(self.seed) and self.seed >= 0), "seed", "an integer, 0 or more")


def uniform(seed: int, position: int) -> float:
    """The noise of a position, in [0, 1): a function of both numbers only, equal on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def law(
    logits: Row,  # [V], after penalties
    sampling: Sampling,
) -> Row:
    """Probabilities, up to a factor, after temperature, top-k, top-p and min-p. [V]; the largest is 1.

    Raises:
        FloatingPointError: NaN, +inf, or nothing but -inf.
    """
    top = logits.max()  # NaN, if there is one
    if not math.isfinite(top):
        raise FloatingPointError
    p: Row = logits - top
    if sampling.temperature != 1:
        with np.errstate(over="ignore"):  # a mask of -3e38 becomes -inf
            p /= sampling.temperature
    np.exp(p, out=p)
    if sampling.top_k or sampling.top_p < 1:
        kept = _likeliest(p, sampling)
        truncated = np.zeros_like(p)
        truncated[kept] = p[kept]
        p = truncated
    if sampling.min_p:
        p[p < sampling.min_p] = 0
    return p


def _likeliest(p: Row, sampling: Sampling) -> NDArray[np.intp]:
    """The ids that top-k keeps, and of those the fewest that reach the mass of top-p; the lower id at a tie."""
    size = min(sampling.top_k or len(p), len(p))
    mass = sampling.top_p * float(p.sum())
    # Sorting a whole row costs 10 ms. Nearly always a few hundred entries hold all that can be kept.
    for floor in (1e-2, 1e-4, 1e-6):
        ids = np.flatnonzero(p > floor)
        if len(ids) >= size or (not sampling.top_k and p[ids].sum() >= mass):
            break
    else:
        ids = np.arange(len(p))
    ids = ids[np.argsort(-p[ids], kind="stable")][:size]
    if sampling.top_p < 1:
        reached = np.cumsum(p[ids], dtype=np.float64)
        mass = sampling.top_p * reached[-1] if sampling.top_k else mass
        ids = ids[: int(np.searchsorted(reached, mass)) + 1]
    return ids


_BLOCK = 512


def invert(p: Row, u: float) -> int:
    """The id at which the running sum of `p` passes `u` of its total (inverse CDF, in order of id).

    Sums blocks first: a running sum over a whole row of 152k would cost more than all the rest of a draw.

    Raises:
        FloatingPointError: the sum is not a positive number.
    """
    whole = len(p) // _BLOCK * _BLOCK
    sums = np.append(p[:whole].reshape(-1, _BLOCK).sum(axis=1), p[whole:].sum())
    edges = np.cumsum(sums, dtype=np.float64)
    total = edges[-1]
    if not (np.isfinite(total) and total > 0):
        raise FloatingPointError
    block = int(np.searchsorted(edges, u * total, side="right"))
    block = min(block, int(np.flatnonzero(sums)[-1]))  # rounding may carry u * total to the very end
    inside = p[block * _BLOCK : (block + 1) * _BLOCK]
    before = edges[block - 1] if block else 0.0
    at = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), u * total - before, side="right"))
    return block * _BLOCK + min(at, int(np.flatnonzero(inside)[-1]))


class Noise:
    """Where the randomness of one answer comes from; tests put an enumeration of all outcomes in its place."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._stream = random.Random(seed)

    def at(self, position: int, p: Row) -> int:
        """An index drawn in proportion to `p` by the noise of this position alone."""
        return invert(p, uniform(self._seed, position))

    def fresh(self, p: Row) -> int:
        """An index drawn in proportion to `p` by noise that was never used before."""
        return invert(p, self._stream.random())


class Sampler:
    """The target's law at one position after the other, and the draws from it, for one answer.

    `draw` is by noise that depends on (seed, position) only, so what is drawn depends on the target's rows alone:
    not on the drafter, on k, or on how many positions a pass covers. Rules that draw otherwise take the `law`,
    and `commit` what they settled on. State moves by committed tokens only.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        size: int,
        *,
        processors: Sequence[Processor] = (),
        noise: Noise | None = None,
        target: str = "the target",
        drafter: str = "the drafter",
    ) -> None:
        """`size`: ids from here on only pad the rows and are never drawn. `processors` come before penalties.
        `target` and `drafter` are what errors call the models."""
        self._names = target, drafter
        self._prompt_length = len(prompt)
        self.sampling = sampling
        self.noise = noise or Noise(secrets.randbits(63) if sampling.seed is None else int(sampling.seed))
        self.position = 0
        self._size = size
        self._processors = processors
        self._tokens = list(prompt) if processors else []
        self._prompt = dict.fromkeys(prompt)
        self._answer: dict[int, int] = {}  # token -> times

    def draw(
        self,
        row: Row,  # [V_target] float32 logits
    ) -> int:
        """The answer's next token, committed.

        Raises:
            InvalidLogitsError: the row holds NaN, +inf, or nothing but -inf.
            OptionError: processors made it so.
        """
        logits = self._processed(row)
        try:
            if self.sampling.temperature == 0:
                token = _likeliest_token(logits)
            else:
                token = self.noise.at(self.position, law(logits, self.sampling))
        except FloatingPointError as error:
            raise self._invalid(row) from error
        self.commit(token)
        return token

    def law(
        self,
        row: Row,  # [V_target] float32 logits
    ) -> Row:
        """Probabilities of the answer's next token, up to a factor. [size]; errors as `draw`."""
        logits = self._processed(row)
        try:
            if self.sampling.temperature == 0:
                p = np.zeros_like(logits)
                p[_likeliest_token(logits)] = 1
                return p
            return law(logits, self.sampling)
        except FloatingPointError as error:
            raise self._invalid(row) from error

    def commit(self, token: int) -> None:
        """The answer goes on with `token`."""
        self.position += 1
        self._answer[token] = self._answer.get(token, 0) + 1
        if self._processors:
            self._tokens.append(token)

    def draft(
        self,
        row: Row,  # [V_draft] the drafter's logits; -inf for unusable tokens
    ) -> tuple[int, Row]:
        """A draft token for a rule that needs its law, and that law up to a factor. [V_draft]

        Drawn under the same temperature and filters: the closer to the target's law, the more is accepted.

        Raises:
            InvalidLogitsError: the row holds NaN, +inf, or nothing but -inf.
        """
        try:
            if self.sampling.temperature == 0:
                q = np.zeros_like(row)
                q[_likeliest_token(row)] = 1
            else:
                q = law(row, self.sampling)
        except FloatingPointError as error:
            raise InvalidLogitsError(self._names[1], self._prompt_length + self.position) from error
        return self.noise.fresh(q), q

    def accepts(self, ratio: float) -> bool:
        """Whether to accept with probability min(1, ratio)."""
        return ratio >= 1 or self.noise.fresh(np.array([ratio, 1 - ratio])) == 0

    def _processed(self, row: Row) -> Row:
        width = row.shape
        for (
            processor
        ) in self._processors:  # whole rows, as transformers gives them: some hold a tensor as wide
            row = processor(self._tokens, row)
            if getattr(row, "shape", None) != width:
                raise OptionError(
                    f"a logits processor gave a {type(row).__name__} that is no row of {width[0]} logits; "
                    "have it return the changed row"
                )
        return self._penalised(row[: self._size])

    def _invalid(self, row: Row) -> OmniDraftError:
        """The error of a row from which nothing can be drawn: the model's, or that of what was done to it since."""
        position = self._prompt_length + self.position
        if not np.isfinite(row[: self._size].max()):
            return InvalidLogitsError(self._names[0], position)
        return OptionError(
            f"after {position} tokens the logits processors or penalties leave no token that can be drawn; "
            "change or drop them"
        )

    def _penalised(self, logits: Row) -> Row:
        repetition, presence = self.sampling.repetition_penalty, self.sampling.presence_penalty
        frequency = self.sampling.frequency_penalty
        if repetition != 1 or presence or frequency:
            logits = logits.copy()
        if repetition != 1:
            ids = list({**self._prompt, **self._answer})
            seen = logits[ids]
            logits[ids] = np.where(seen > 0, seen / repetition, seen * repetition)
        if presence or frequency:
            times = np.array(list(self._answer.values()), logits.dtype)
            logits[list(self._answer)] -= presence + frequency * times
        return logits


def _likeliest_token(logits: Row) -> int:
    token = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[token]):
        raise FloatingPointError
    return token
