"""The records that travel through the loop, and the key of symbols.

k        draft tokens asked for in a step
m        proposed target tokens after translation
n        accepted target tokens, 0 <= n <= m
symbol   a token that both vocabularies have, byte for byte: what n-grams and splits are spelled in
V_draft  width of the drafter's logits;  V_target  width of the target's

Token ids are `list[int]`, `tuple[int, ...]`, or `Tokens` where a sequence grows with the context; the bytes a
token stands for are its `piece`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# Logits live in main memory as numpy arrays, whatever the engine: there numpy works a row of 152k in a third of
# torch's time, since it wakes no threads and its argmax uses the vector units.
Row = NDArray[np.floating[Any]]  # [V]
Rows = NDArray[np.floating[Any]]  # [rows, V]

# Contexts and what KV caches hold: machine integers side by side. Comparing two of them, which every pass does, then
# costs the same at any length; lists of integers lie scattered in memory, cold after each pass.
Tokens = array  # of int


def as_tokens(ids: Iterable[int] = ()) -> Tokens[int]:
    """Token ids as one block of memory."""
    return array("i", ids)


Source = Literal["drafted", "lookup"]  # of a proposal: the drafter, or what was met before
Provenance = Literal[Source, "correction", "free"]


@dataclass(frozen=True, slots=True)
class Draft:
    """What the drafter wrote in one step, in its own vocabulary.

    `laws` are what the tokens were drawn from, up to a factor; empty when each was the likeliest.
    """

    tokens: tuple[int, ...]  # [k]
    laws: tuple[Row, ...] = ()  # k rows of [V_draft]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft in the target's vocabulary; its pieces spell the draft's bytes or a prefix of them.

    `lengths` says how many base symbols each token was made of: more than one is an n-gram. Empty when the
    text was re-tokenised. A proposal that was looked up (`omnidraft.lookup`) has no draft.
    """

    tokens: tuple[int, ...]  # [m]
    lengths: tuple[int, ...] = ()  # [m] or empty
    source: Source = "drafted"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's word on a proposal: `tokens[:accepted]` were proposed, the rest is the target's own draw."""

    tokens: tuple[int, ...]  # [accepted] or [accepted + 1]
    accepted: int  # n


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop; the only thing that leaves it.

    `tokens` is what entered the answer: the verdict's tokens, cut after a token that ends the answer. `rows` are
    what verification saw, raw; an engine may write over them in its next pass, so look at them at once.
    Seconds are wall time: `draft_seconds` and `verify_seconds` inside the models' passes, `seconds` in all.
    """

    draft: Draft
    proposal: Proposal
    tokens: tuple[int, ...]
    accepted: int  # of `tokens`, how many were proposed
    rows: Rows = field(
        repr=False, compare=False
    )  # [m + 1, V_target] the target's logits at the proposed positions
    draft_seconds: float
    verify_seconds: float
    seconds: float

    @property
    def ngram_hits(self) -> int:
        """How many n-grams were proposed and accepted."""
        return sum(length > 1 for length in self.proposal.lengths[: self.accepted])

    def provenance(self, i: int) -> Provenance:
        """Where `tokens[i]` came from: the drafter, a look-up, or the target after a rejection or full acceptance."""
        if i < self.accepted:
            return self.proposal.source
        return "correction" if self.accepted < len(self.proposal.tokens) else "free"
