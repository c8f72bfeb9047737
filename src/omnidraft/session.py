"""What the loop asks of an engine, and `feed`, the only way to move a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from omnidraft.types import Rows, Tokens, as_tokens
from omnidraft.vocab import Vocab

_CHUNK = 512  # tokens of a prefill pass: bounds the memory of attention and activations


class Session(Protocol):
    """One KV cache of one model.

    `tokens` is what the cache holds; `seconds` is the wall time spent in passes so far.
    """

    tokens: Tokens[int]
    seconds: float

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """Append tokens in one pass; return the logits after the last `rows` of them. [rows, V] float32"""


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

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The messages through the model's chat template, ready for its answer."""

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
    if not 1 <= rows <= len(tokens):
        raise ValueError(f"rows is {rows}, must be in 1..{len(tokens)}")
    if not isinstance(tokens, Tokens):
        tokens = as_tokens(tokens)
    keep = min(_common_prefix(session.tokens, tokens), len(tokens) - rows)
    if keep < len(session.tokens):
        session.truncate(keep)
    while len(tokens) - keep > max(_CHUNK, rows):
        end = min(keep + _CHUNK, len(tokens) - rows)
        session.extend(tokens[keep:end], rows=0)
        keep = end
    return session.extend(tokens[keep:], rows)


def _common_prefix(a: Tokens[int], b: Tokens[int]) -> int:
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
