"""The target's own log-probabilities of the tokens of a Step, taken while its rows are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from omnidraft.types import Step
from omnidraft.vocab import Vocab

_LEAST = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability (nats) at temperature 1 before any filter, and the likeliest in its place."""

    piece: bytes
    text: str
    logprob: float
    top: tuple[tuple[bytes, str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """As chat completions have it."""
        return _entry(self.piece, self.text, self.logprob) | {
            "top_logprobs": [_entry(*candidate) for candidate in self.top]
        }


def logprobs_of(step: Step, vocab: Vocab, count: int) -> list[TokenLogprob]:
    """One for each of the step's tokens, with the `count` likeliest."""
    found = []
    for token, row in zip(step.tokens, step.rows, strict=False):
        row = row[: vocab.size].astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        likeliest = np.argpartition(-row, count - 1)[:count] if count else np.empty(0, np.intp)
        top = sorted(likeliest.tolist(), key=lambda id: -row[id])
        found.append(
            TokenLogprob(
                *_named(vocab, token),
                max(float(row[token]), _LEAST),
                tuple((*_named(vocab, id), max(float(row[id]), _LEAST)) for id in top),
            )
        )
    return found


def _named(vocab: Vocab, token: int) -> tuple[bytes, str]:
    text = vocab.special_text.get(token)
    piece = text.encode() if text is not None else vocab.pieces[token]
    return piece, piece.decode("utf-8", "replace")


def _entry(piece: bytes, text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(piece)}
