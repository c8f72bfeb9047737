"""What the loop asks of an engine; `feed` and `write`, the only ways to move a KV cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omnidraft.types import Rows, Tokens, as_tokens
from omnidraft.vocab import Vocab

_CHUNK = 512  # tokens of a prefill pass: bounds the memory of attention and activations


class Session(Protocol):
    """One KV cache of one model. Engines inherit from it, for `continue_greedily`.

    `tokens` is what the cache holds; `seconds` is the wall time spent in passes so far.
    """

    tokens: Tokens[int]
    seconds: float

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """Append tokens in one pass; return the logits after the last `rows` of them. [rows, V] float32"""

    @property
    def hidden(self) -> Rows:
        """What the output layer was given for the last pass's rows. [rows, hidden size] float32

        Raises:
            NotImplementedError: an engine that does not show it, and cannot learn.
        """
        engine = type(self).__name__
        raise NotImplementedError(f"{engine} does not show hidden states")

    def continue_greedily(
        self,
        tokens: Sequence[int],
        k: int,
        usable: NDArray[np.bool_],  # [V]
        ends: Collection[int],
    ) -> list[int]:
        """Append tokens, and go on with the likeliest usable token each time: k of them, or to one of `ends`.

        Returns what was written, its last token not in the cache yet. One call, its whole time counted in `seconds`:
        an engine that finds the likeliest token itself hands over no rows of logits at all.
        """
        start, before = perf_counter(), self.seconds
        written: list[int] = []
        while len(written) < k and not (written and written[-1] in ends):
            row = self.extend(written[-1:] or tokens, 1)[0]
            token = int(row.argmax())
            if not usable[token]:
                token = int(np.where(usable, row, -np.inf).argmax())
            written.append(token)
        self.seconds = before + perf_counter() - start
        return written


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs a model. `precision`: of its weights; `reason`: why it was chosen, empty where the user did."""

    name: str
    precision: str
    device: str
    reason: str = ""


class Model(Protocol):
    """Weights and vocabulary. Never altered by use; any number of sessions share it."""

    name: str
    engine: Engine
    context_length: int  # tokens

    @property
    def vocab(self) -> Vocab:
        """The table of bytes, as wide as the logits."""

    def session(self) -> Session:
        """A new, empty KV cache."""

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The messages, and the tools that the answer may call, through the chat template, ready for the answer."""

    def encode(self, text: str) -> list[int]:
        """Raw text as the model's tokenizer gives it, its own BOS included."""


def feed(
    session: Session,
    tokens: Sequence[int],
    rows: int,
) -> Rows:
    """Make the KV cache hold exactly `tokens`; return the logits after the last `rows` of them. [rows, V]

    Prefill, catch-up, rewind after a rejection, an abandoned stream: all are the common prefix kept, the rest
    cut off, the missing tokens appended.

    Raises:
        ValueError: rows is not in 1..len(tokens).
    """
    return session.extend(_missing(session, tokens, rows), rows)


def write(
    session: Session,
    tokens: Sequence[int],
    k: int,
    usable: NDArray[np.bool_],  # [V]
    ends: Collection[int],
) -> list[int]:
    """Make the KV cache hold exactly `tokens`, as `feed` does, and let the model write on greedily.

    Up to k tokens, each the likeliest usable one; none after one of `ends`. The cache then holds all but the last.

    Raises:
        ValueError: there are no tokens.
    """
    return session.continue_greedily(_missing(session, tokens, 1), k, usable, ends)


def _missing(session: Session, tokens: Sequence[int], rows: int) -> Tokens[int]:
    """Rewind the cache to what it shares with `tokens`, and append all but one last pass; the tokens of that."""
    if not 1 <= rows <= len(tokens):
        raise ValueError(f"rows is {rows}, must be in 1..{len(tokens)}")
    if not isinstance(tokens, Tokens):
        tokens = as_tokens(tokens)
    keep = min(common_prefix(session.tokens, tokens), len(tokens) - rows)
    if keep < len(session.tokens):
        session.truncate(keep)
    while len(tokens) - keep > max(_CHUNK, rows):
        end = min(keep + _CHUNK, len(tokens) - rows)
        session.extend(tokens[keep:end], rows=0)
        keep = end
    return tokens[keep:]


def common_prefix(a: Tokens[int], b: Tokens[int]) -> int:
    """Length of the common prefix, found by comparing blocks of memory."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
