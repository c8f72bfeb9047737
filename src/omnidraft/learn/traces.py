"""What verification knows of an answer, kept for training the drafter: Steps in, one Trace an answer out.

The target is never run again to train. Its rows, which verification holds at every position of the answer anyway,
are pushed forward onto base symbols (see `omnidraft.ngrams`) and laid beside the drafter's own spelling of the answer,
byte by byte; so every draft token has a teacher, whether the target has that token or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from omnidraft.ngrams import Trie
from omnidraft.spellings import Node
from omnidraft.translate import DraftContext
from omnidraft.types import Row, Step
from omnidraft.vocab import Vocab

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

KEPT = 32  # entries kept of a law; on real answers what is left holds under 1 % of the probability


@dataclass(frozen=True, slots=True)
class Law:
    """The likeliest entries of a law over base symbols; what is left of 1 lies on all others together."""

    symbols: Ints  # [KEPT], -1 where there are fewer
    chances: Floats  # [KEPT]

    @classmethod
    def top(cls, symbols: NDArray[np.integer], chances: Row) -> Law:  # [n], [n]
        """Keep the likeliest."""
        if len(symbols) > KEPT:
            best = np.argpartition(chances, -KEPT)[-KEPT:]
            symbols, chances = symbols[best], chances[best]
        padding = KEPT - len(symbols)
        return cls(
            np.pad(symbols.astype(np.int32), (0, padding), constant_values=-1),
            np.pad(chances.astype(np.float32), (0, padding)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One answer in the drafter's spelling, with what the target said of it.

    T teachers: the target's law of the next base symbol, pushed forward from its row (DESIGN 4, "push-forward").
    Teacher i speaks of the draft token at `positions[i]`, given that it is among the rows `nodes[i]` (low, high,
    depth) of the drafter's spelling table. D words of the paper's loss (its equation 4): where a target token begins
    with a draft token, the target's row on direct tokens, as symbols. N draft tokens that spell an n-gram.
    """

    tokens: Ints  # [n] the drafter's ids of the prompt and the answer
    prompt: Ints  # [1] how many of them are the prompt's
    positions: Ints  # [T] into `tokens`
    nodes: Ints  # [T, 3]
    symbols: Ints  # [T, KEPT], -1 where there are fewer
    chances: Floats  # [T, KEPT]
    direct_positions: Ints  # [D] into `tokens`
    direct_symbols: Ints  # [D, KEPT]
    direct_chances: Floats  # [D, KEPT]
    ngram_positions: Ints  # [N] into `tokens`
    ngram_begins: NDArray[np.bool_]  # [N] whether an n-gram begins there
    ngram_chances: Floats  # [N] p of the whole n-gram
    skipped: Ints  # [1] draft tokens of the answer without a teacher
    temperature: (
        Floats  # [1] that drafts were drawn at, for a rule that knows their law; 0: each was the likeliest
    )

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def tail(self, length: int) -> Trace:
        """The same with the prompt's beginning cut off, so that at most `length` tokens are left, if it can be."""
        cut = min(max(len(self.tokens) - length, 0), int(self.prompt[0]) - 1)
        if cut <= 0:
            return self
        moved = {
            name: getattr(self, name) - np.int32(cut)
            for name in ("prompt", "positions", "direct_positions", "ngram_positions")
        }
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        return Trace(**kept | moved | {"tokens": self.tokens[cut:]})

    def goes_on(self, vocab: Vocab, tokens: Sequence[int]) -> Floats:
        """Whether the answer goes on as a token would, at each of its positions: 1, 0, or NaN where it ends first.

        `vocab`: the drafter's; `tokens`: one for each position. [n - prompt]; so is the result
        """
        own = [_sign(vocab, token, token) for token in self.tokens[int(self.prompt[0]) :].tolist()]
        text, found = b"".join(own), np.empty(len(own), np.float32)
        for i, (at, token) in enumerate(zip(_begins(own, 0), tokens, strict=False)):
            sign, rest = _sign(vocab, token, token), text[at:]
            ended = len(rest) < len(sign) and sign.startswith(rest)
            found[i] = np.nan if ended else bool(sign) and rest.startswith(sign)
        return found


@dataclass(frozen=True, slots=True)
class _Word:
    """The target's word on one token of the answer."""

    token: int
    chance: float  # p(token)
    symbols: tuple[int, ...]  # the token's spelling; empty when it has none
    direct: Law  # p on direct tokens
    laws: tuple[Law, ...]  # before each symbol of the spelling; of the first alone when there is none


class Tracer:
    """Collects the Steps of one answer."""

    def __init__(self, trie: Trie, prompt: Sequence[int], temperature: float = 0.0) -> None:
        """`trie`: the pair's, with every n-gram; `prompt`: the target's tokens; `temperature`: see `Trace`."""
        self._trie = trie
        self._temperature = temperature
        self._prompt = list(prompt)
        self._words: list[_Word] = []
        # Had the last token been longer: what could have gone on, how likely each, and that it was not.
        self._beyond: tuple[NDArray[np.integer], Row, float] = _ENDED

    @property
    def tokens(self) -> list[int]:
        """The answer so far, in the target's tokens."""
        return [word.token for word in self._words]

    def add(self, step: Step) -> None:
        """Keep what the rows of a Step say of its tokens."""
        for token, row in zip(step.tokens, step.rows, strict=False):
            self.see(token, row)

    def see(
        self,
        token: int,
        row: Row,  # [V_target] the raw logits it was drawn from
    ) -> None:
        """Keep what a row says of a token of the answer."""
        # At temperature 1, before any filter: the row of a greedy law is one-hot.
        row = row[: self._trie.lexicon.alignment.target.size]
        p = np.exp(row - row.max())
        p /= p.sum(dtype=np.float64)
        spelling = self._trie.spelling(token)
        symbols, chances, _ = self._law(p, self._trie.root)
        # Either the last token ends where it did and this row decides, or it goes on.
        further, more, stop = self._beyond
        chances *= stop
        chances[np.searchsorted(symbols, further)] += more
        laws = [Law.top(symbols, chances)]
        self._beyond = _ENDED
        for depth in range(1, len(spelling) + 1):
            self._beyond = self._law(p, self._trie.find(spelling[:depth]))
            laws.append(Law.top(*self._beyond[:2]))
        token_of = self._trie.lexicon.token_of
        direct = Law.top(np.arange(len(token_of)), p[token_of])
        self._words.append(_Word(token, float(p[token]), spelling, direct, tuple(laws[: len(spelling) or 1])))

    def _law(self, p: Row, node: Node | None) -> tuple[NDArray[np.integer], Row, float]:
        """The symbols that can come after `node`, how likely each is given that it is reached, and that none is."""
        if node is None:
            return _ENDED
        branches = self._trie.branches(node)
        if not len(branches.symbols):
            return _ENDED
        masses = branches.masses(p)
        if node.depth:
            masses /= max(float(masses.sum()), 1e-30)  # the whole may have rounded to nothing
        stop = float(masses[-1]) if node.depth else 0.0
        return branches.symbols, masses[:-1], stop

    def trace(self) -> Trace | None:
        """The answer so far; None when there is none, or the drafter's vocabulary cannot spell it."""
        if not self._words:
            return None
        alignment = self._trie.lexicon.alignment
        special = alignment.special_target_to_draft
        answer = [_sign(alignment.target, word.token, special.get(word.token)) for word in self._words]
        context = DraftContext(alignment)
        context.extend([*self._prompt, *(word.token for word in self._words)])
        drafted = [_sign(alignment.draft, token, token) for token in context.tokens]
        whole, text = b"".join(drafted), b"".join(answer)
        if not whole.endswith(text):
            return None
        # Where each token begins, in bytes from the start of the answer.
        word_at = _begins(answer, 0)
        draft_at = _begins(drafted, len(text) - len(whole))
        teachers = self._teachers(word_at)
        words = dict(zip(word_at, self._words, strict=False))
        # The first token of all has no logits: nothing comes before it.
        first = max(1, next(j for j, at in enumerate(draft_at) if at >= 0))
        rows, skipped = [], 0
        for j in range(first, len(context.tokens)):
            own = list(self._taught(context.tokens[j], draft_at[j], teachers))
            rows += [(j, node, law) for node, law in own]
            skipped += not own
        direct = [(j, words[at].direct) for j, at in enumerate(draft_at) if j >= first and at in words]
        ngrams = [
            (j, j == parts[0], word.chance)
            for word, (low, high) in zip(self._words, pairwise(word_at), strict=True)
            if (parts := _parts(draft_at, low, high))
            for j in parts
        ]
        return Trace(
            tokens=np.array(context.tokens, np.int32),
            prompt=np.array([first], np.int32),
            positions=np.array([j for j, _, _ in rows], np.int32),
            nodes=np.array([node for _, node, _ in rows], np.int32).reshape(-1, 3),
            symbols=np.array([law.symbols for _, _, law in rows], np.int32).reshape(-1, KEPT),
            chances=np.array([law.chances for _, _, law in rows], np.float32).reshape(-1, KEPT),
            direct_positions=np.array([j for j, _ in direct], np.int32),
            direct_symbols=np.array([law.symbols for _, law in direct], np.int32).reshape(-1, KEPT),
            direct_chances=np.array([law.chances for _, law in direct], np.float32).reshape(-1, KEPT),
            ngram_positions=np.array([j for j, _, _ in ngrams], np.int32),
            ngram_begins=np.array([begins for _, begins, _ in ngrams], np.bool_),
            ngram_chances=np.array([chance for _, _, chance in ngrams], np.float32),
            skipped=np.array([skipped], np.int32),
            temperature=np.array([self._temperature], np.float32),
        )

    def _teachers(self, word_at: Sequence[int]) -> dict[int, Law]:
        """The law of the next base symbol at every byte of the answer where one begins."""
        teachers: dict[int, Law] = {}
        for at, word in zip(word_at, self._words, strict=False):
            for law, before in zip(
                word.laws, accumulate(map(self._length, word.symbols), initial=0), strict=False
            ):
                teachers[at + before] = law
        return teachers

    def _taught(self, token: int, at: int, teachers: dict[int, Law]) -> Iterator[tuple[Node, Law]]:
        """A draft token's teachers: of its first symbol, and of each further one given those before."""
        table = self._trie.lexicon.draft
        if (row := table.row(token)) < 0:
            return
        node = table.root
        for symbol in table.spelling(row):
            if at in teachers:
                yield node, teachers[at]
            node = table.below(table.child(node, symbol))
            at += self._length(symbol)

    def _length(self, symbol: int) -> int:
        lexicon = self._trie.lexicon
        token = int(lexicon.token_of[symbol])
        matched = lexicon.alignment.special_target_to_draft.get(token)
        return len(_sign(lexicon.alignment.target, token, matched))


_ENDED: tuple[NDArray[np.integer], Row, float] = np.empty(0, np.int32), np.empty(0), 1.0


def _sign(vocab: Vocab, token: int, matched: int | None) -> bytes:
    """A token's bytes; of a special one that the drafter has too, a mark that no text holds."""
    if token not in vocab.special_text:
        return vocab.pieces[token]
    return b"" if matched is None else b"\xff<%d>" % matched


def _begins(signs: Sequence[bytes], start: int) -> list[int]:
    """[n + 1] where each begins, and where the last one ends."""
    return [start, *(start + end for end in accumulate(map(len, signs)))]


def _parts(draft_at: Sequence[int], low: int, high: int) -> range | None:
    """The draft tokens that spell the bytes low:high, if there are several and they begin and end there."""
    begin, end = bisect_left(draft_at, low), bisect_left(draft_at, high)
    whole = begin and draft_at[begin] == low and end < len(draft_at) and draft_at[end] == high
    return range(begin, end) if whole and end - begin > 1 else None
