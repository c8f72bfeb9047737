"""From the target's tokens to the drafter's context, and from a draft to a proposal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from omnidraft.ngrams import Trie
from omnidraft.types import Draft, Proposal, as_tokens
from omnidraft.vocab import Alignment, Vocab, runs

_WINDOW = (
    32  # tokens looked back for a safe boundary; a bound on the work of a step, whatever the context's length
)


def safe_boundary(vocab: Vocab, tokens: Sequence[int]) -> int | None:
    """The start of the last word in `tokens`: no tokenizer we know merges across it.

    A word starts at a piece of one space and a letter or digit that does not follow white space, or right
    after a special token. Returns an index into `tokens`, or None when there is none within the window.
    """
    for i in range(len(tokens) - 1, max(len(tokens) - _WINDOW, 0) - 1, -1):
        before = vocab.pieces[tokens[i - 1]] if i else b""
        piece = vocab.pieces[tokens[i]]
        if not piece:
            return i + 1
        if not before or (piece[:1] == b" " and piece[1:2].isalnum() and not before[-1:].isspace()):
            return i
    return None if tokens else 0


def retokenise(vocab: Vocab, context: Sequence[int], data: bytes) -> tuple[int, list[int]]:
    """Spell `data` after `context` as the tokenizer would have, had it seen both together.

    Returns (keep, tokens): `context[:keep] + tokens` stands for the context's bytes followed by `data`.
    """
    start = safe_boundary(vocab, context)
    if start is not None:
        whole = vocab.decode(context[start:]) + data
        tokens = vocab.encode_bytes(whole)
        if vocab.decode(tokens) == whole:
            return start, tokens
    return len(context), vocab.encode_bytes(data)


Crossing = Literal["direct", "ngram", "split"]


def crossings(draft: Sequence[bytes], proposal: Sequence[bytes]) -> list[Crossing]:
    """How each proposed piece came out of the draft's: as one of them, as several joined, or by taking one apart."""
    ends = {0, *accumulate(map(len, draft))}
    found: list[Crossing] = []
    start = 0
    for piece in proposal:
        end = start + len(piece)
        if {start, end} <= ends:
            found.append("ngram" if any(start < inner < end for inner in ends) else "direct")
        else:
            found.append("split")
        start = end
    return found


class DraftContext:
    """The drafter's view of the target's context: its own BOS, matched special tokens, and text as bytes.

    `tokens` is what the drafter's KV cache should hold. Text is spelled canonically across steps: new bytes
    are encoded together with the last word. Special tokens with no counterpart are left out.
    """

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        self.tokens = as_tokens()

    def extend(self, target_tokens: Sequence[int]) -> None:
        """Follow the target's context by these tokens of it."""
        if self.alignment.same:
            self.tokens.extend(target_tokens)
            return
        draft = self.alignment.draft
        for run in runs(self.alignment.target, target_tokens):
            if not self.tokens and draft.bos is not None:
                self.tokens.append(draft.bos)
            if isinstance(run, bytes):
                keep, tokens = retokenise(draft, self.tokens, draft.opened(self.tokens, run))
                self.tokens[keep:] = as_tokens(tokens)
            elif (special := self.alignment.special_target_to_draft.get(run)) is not None and (
                # not twice: the target's BOS, or a chat that begins with the drafter's
                list(self.tokens[:2]) != [special]
            ):
                self.tokens.append(special)


class Translator(Protocol):
    """Drafts of one drafter as proposals to one target."""

    alignment: Alignment
    usable: NDArray[np.bool_]  # [V_draft] the draft tokens that can become a proposal; no other is drafted
    ends: frozenset[int]  # drafting ends after one of these: an end of answer, another special token

    def translate(self, context: Sequence[int], draft: Draft) -> Proposal:
        """The draft behind `context` (the target's tokens so far), in the target's vocabulary."""

    def observe(self, tokens: Sequence[int], proposal: Proposal, accepted: int) -> None:
        """Learn from a step that is over: the verified tokens, and how much of the proposal was accepted."""


class TextTranslator:
    """Re-tokenises the drafted bytes behind a safe boundary of the target's context (DESIGN 3a)."""

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        mapped = alignment.draft_to_target
        self.usable = np.array([mapped[id] >= 0 or bool(p) for id, p in enumerate(alignment.draft.pieces)])
        self.ends = frozenset(alignment.special_draft_to_target)

    def translate(self, context: Sequence[int], draft: Draft) -> Proposal:
        """See `Translator`. An incomplete last character is held back: the target may have a token for all of it."""
        if self.alignment.same:
            return Proposal(draft.tokens)
        mapped = self.alignment.draft_to_target
        tokens = list(draft.tokens)
        special = [mapped[tokens.pop()]] if tokens and tokens[-1] in self.ends else []
        data = self.alignment.draft.decode(tokens)
        complete = _complete_characters(data) if not special else data
        text = self._propose(context, complete or data)
        if special and self.alignment.target.decode(text) == data:
            text += special
        return Proposal(tuple(text))

    def observe(self, tokens: Sequence[int], proposal: Proposal, accepted: int) -> None:
        """Nothing to learn: the tokenizer knows all."""

    def _propose(self, context: Sequence[int], data: bytes) -> list[int]:
        target = self.alignment.target
        keep, tokens = retokenise(target, context, data)
        tail = list(context[keep:])
        if tail:
            if tokens[: len(tail)] == tail:
                return tokens[len(tail) :]
            tokens = target.encode_bytes(data)  # the canonical spelling would have begun inside the context
        # Bytes the target cannot spell end the proposal: what follows them would stand in the wrong place.
        spelled = 0
        for i, token in enumerate(tokens):
            piece = target.pieces[token]
            if data[spelled : spelled + len(piece)] != piece:
                return tokens[:i]
            spelled += len(piece)
        return tokens


class SymbolTranslator:
    """Spells the draft in base symbols and reads known tokens out of them.

    With a trie of base symbols only this is the paper's SpDDM baseline (and, with splits, a little more); with
    the n-grams met so far it is the paper's cache.
    """

    def __init__(self, trie: Trie, *, walk: bool = False, grow: bool = False) -> None:
        """`walk`: read as the rule `trie` walks, else by longest match. `grow`: insert n-grams as they are met."""
        self.trie = trie
        self.alignment = trie.lexicon.alignment
        self.ends = frozenset(self.alignment.special_draft_to_target)
        self.usable = trie.lexicon.usable(trie.splits)
        self._walk = walk
        self._grow = grow

    def translate(self, context: Sequence[int], draft: Draft) -> Proposal:
        """See `Translator`."""
        table = self.trie.lexicon.draft
        symbols = [symbol for token in draft.tokens for symbol in table.spelling(table.row(token))]
        tokens, lengths = [], []
        while symbols:
            token, length = self.trie.walk(symbols) if self._walk else self.trie.match(symbols)
            if not length:
                break
            tokens.append(token)
            lengths.append(length)
            symbols = symbols[length:]
        return Proposal(tuple(tokens), tuple(lengths))

    def observe(self, tokens: Sequence[int], proposal: Proposal, accepted: int) -> None:
        """Count accepted n-grams as used, and insert those of the verified tokens."""
        for token, length in zip(proposal.tokens[:accepted], proposal.lengths, strict=False):
            if length > 1:
                self.trie.use(token)
        if self._grow:
            self.trie.insert(tokens)


def _complete_characters(data: bytes) -> bytes:
    """`data` without an incomplete last UTF-8 character: the target may have one token for all of it."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 != 0x80:  # the first byte of the last character
            need = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data if back >= need else data[:-back]
    return data
