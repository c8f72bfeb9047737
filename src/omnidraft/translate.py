"""From the target's tokens to the drafter's context, and from a draft to a proposal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from omnidraft.types import Draft, Proposal
from omnidraft.vocab import Alignment, Vocab, runs

Method = Literal["direct", "text"]

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


class DraftContext:
    """The drafter's view of the target's context: its own BOS, matched special tokens, and text as bytes.

    `tokens` is what the drafter's KV cache should hold. Text is spelled canonically across steps: new bytes
    are encoded together with the last word. Special tokens with no counterpart are left out.
    """

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        self.tokens: list[int] = []

    def extend(self, target_tokens: Sequence[int]) -> None:
        """Follow the target's context by these tokens of it."""
        draft = self.alignment.draft
        for run in runs(self.alignment.target, target_tokens):
            if not self.tokens and draft.bos is not None:
                self.tokens.append(draft.bos)
            if isinstance(run, bytes):
                keep, tokens = retokenise(draft, self.tokens, run)
                self.tokens[keep:] = tokens
            elif (special := self.alignment.special_target_to_draft.get(run)) is not None and (
                self.tokens != [special]  # the target's BOS, or a chat that begins with the drafter's
            ):
                self.tokens.append(special)


class Translator:
    """Drafts of one drafter as proposals to one target.

    `direct` maps token by token and drafts only what has a counterpart (the paper's SpDDM baseline);
    `text` re-tokenises the drafted bytes behind a safe boundary of the target's context (DESIGN 3a).
    """

    def __init__(self, alignment: Alignment, method: Method) -> None:
        self.alignment = alignment
        self.method = method
        mapped = alignment.draft_to_target
        special = alignment.special_draft_to_target
        text = method == "text"
        # Which draft ids can become a proposal; the drafter draws no other. [V_draft]
        self.usable = np.array(
            [mapped[id] >= 0 or (text and bool(piece)) for id, piece in enumerate(alignment.draft.pieces)]
        )
        self.ends = frozenset(special)  # drafting ends after an end of answer or another special token

    def translate(self, context: Sequence[int], draft: Draft) -> Proposal:
        """The draft behind `context` (the target's tokens so far), in the target's vocabulary."""
        mapped = self.alignment.draft_to_target
        if self.method == "direct":
            return Proposal(tuple(mapped[token] for token in draft.tokens))
        tokens = list(draft.tokens)
        special = [mapped[tokens.pop()]] if tokens and tokens[-1] in self.ends else []
        data = self.alignment.draft.decode(tokens)
        complete = _complete_characters(data) if not special else data
        text = self._propose(context, complete or data)
        return Proposal((*text, *special) if self.alignment.target.decode(text) == data else tuple(text))

    def _propose(self, context: Sequence[int], data: bytes) -> list[int]:
        target = self.alignment.target
        keep, tokens = retokenise(target, context, data)
        tail = list(context[keep:])
        if tokens[: len(tail)] == tail:
            tokens = tokens[len(tail) :]
        else:  # the canonical spelling would have begun inside the context
            tokens = target.encode_bytes(data)
        # Bytes the target cannot spell end the proposal: what follows them would stand in the wrong place.
        spelled = 0
        for i, token in enumerate(tokens):
            piece = target.pieces[token]
            if data[spelled : spelled + len(piece)] != piece:
                return tokens[:i]
            spelled += len(piece)
        return tokens


def _complete_characters(data: bytes) -> bytes:
    """`data` without an incomplete last UTF-8 character: the target may have one token for all of it."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 != 0x80:  # the first byte of the last character
            need = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data if back >= need else data[:-back]
    return data
