"""Logits to tokens: the law in force at a position, and the one draw from it."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnidraft.errors import InvalidLogitsError, OptionError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the meanings and the order are those of transformers.

    temperature: 0 takes the most likely token. top_k: 0 keeps all. top_p, min_p: 1 and 0 keep all.
    repetition_penalty: divides the logits of tokens seen in prompt or answer (CTRL); presence_penalty:
    subtracted from those of tokens in the answer. seed: None draws a fresh one.

    Raises:
        OptionError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, must: str) -> None:
            if not ok:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be {must}")

        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 or more")
        check(self.top_k >= 0, "top_k", "0 (all) or more")
        check(0 < self.top_p <= 1, "top_p", "above 0, at most 1")
        check(0 <= self.min_p < 1, "min_p", "at least 0, below 1")
        check(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "above 0",
        )
        check(math.isfinite(self.presence_penalty), "presence_penalty", "finite")
        check(self.seed is None or self.seed >= 0, "seed", "0 or more")


def uniform(seed: int, position: int) -> float:
    """The noise of a position, in [0, 1): a function of both numbers only, equal on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def argmax(row: Tensor) -> int:
    """Index of the largest entry; numpy's is ten times as fast as torch's where the row is in main memory."""
    return int(row.numpy().argmax() if row.device.type == "cpu" else row.argmax())


def law(
    logits: Tensor,  # [V] float32, after penalties
    sampling: Sampling,
) -> Tensor:
    """Probabilities in proportion (they need not sum to 1) after temperature, top-k, top-p and min-p. [V]"""
    scaled = logits / sampling.temperature
    p = torch.exp(scaled - scaled.max())
    keep = p.shape[-1]
    if sampling.top_p < 1:
        keep = _nucleus(p, sampling)
    elif sampling.top_k:
        keep = min(sampling.top_k, keep)
    if keep < p.shape[-1]:
        kept, ids = torch.topk(p, keep)
        p = torch.zeros_like(p).scatter_(0, ids, kept)
    if sampling.min_p:
        p = torch.where(p >= sampling.min_p, p, 0.0)  # p's largest entry is 1
    return p


def _nucleus(p: Tensor, sampling: Sampling) -> int:
    """How many of the likeliest tokens top-p keeps, of those that top-k keeps: as few as reach the mass."""
    size = p.shape[-1]
    limit = min(sampling.top_k or size, size)
    total = float(torch.topk(p, limit).values.sum()) if limit < size else float(p.sum())
    look = min(64, limit)  # a whole sort of 152k entries costs 10 ms; the nucleus is nearly always small
    while True:
        mass = torch.cumsum(torch.topk(p, look).values, 0)
        reached = int(torch.searchsorted(mass, sampling.top_p * total)) + 1
        if reached <= look or look == limit:
            return min(reached, look)
        look = min(look * 16, limit)


class Sampler:
    """Draws the target's tokens one position after the other, for one answer.

    A position's noise depends on (seed, position) only, so what is drawn depends on the target's rows alone:
    not on the drafter, on k, or on how many positions a pass covers. State moves by drawn tokens only.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], size: int) -> None:
        """`size`: ids from here on only pad the rows and are never drawn."""
        self.sampling = sampling
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.position = 0
        self._size = size
        self._prompt = list(dict.fromkeys(prompt))
        self._answer: dict[int, None] = {}

    def draw(
        self,
        row: Tensor,  # [V_target] float32 logits
    ) -> int:
        """The answer's next token.

        Raises:
            InvalidLogitsError: the row holds NaN, +inf, or nothing but -inf.
        """
        row = self._penalised(row[: self._size])
        if self.sampling.temperature == 0:
            token = argmax(row)
            if not math.isfinite(float(row[token])):
                raise InvalidLogitsError(_INVALID)
        else:
            cdf = torch.cumsum(law(row, self.sampling), 0)
            total = float(cdf[-1])
            if not (math.isfinite(total) and total > 0):
                raise InvalidLogitsError(_INVALID)
            # Rounding must not carry the noise to the end, past the last token with any probability.
            x = cdf.new_tensor(uniform(self.seed, self.position) * total)
            x = torch.minimum(x, torch.nextafter(cdf[-1], torch.zeros_like(x)))
            token = int(torch.searchsorted(cdf, x, right=True))
        self.position += 1
        self._answer[token] = None
        return token

    def _penalised(self, row: Tensor) -> Tensor:
        repetition, presence = self.sampling.repetition_penalty, self.sampling.presence_penalty
        if repetition != 1:
            ids = torch.tensor([*self._prompt, *self._answer], device=row.device)
            seen = row[ids]
            row = row.index_put((ids,), torch.where(seen > 0, seen / repetition, seen * repetition))
        if presence and self._answer:
            ids = torch.tensor([*self._answer], device=row.device)
            row = row.index_put((ids,), row[ids] - presence)
        return row


_INVALID = "the target's logits hold NaN or infinity; load it with dtype='float32', or check that its files are whole"
