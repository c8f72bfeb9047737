"""Both vocabularies spelled in what they share, sorted so that a range of rows is a node of a trie.

A *base symbol* is a target token that the drafter has too, byte for byte. Everything else is spelled in base
symbols: a target token by the drafter's tokens for its bytes (an n-gram), a draft token without counterpart by
the target's tokens for its bytes (a split). Sorted by spelling, all tokens that begin alike stand side by side;
so a node of the trie is a range of rows, and no tree is ever built.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from omnidraft.vocab import Alignment, Vocab

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

_log = logging.getLogger(__name__)
_TABLE_VERSION = 2  # of spelling tables on disk; a table of another version is built anew


class Node(NamedTuple):
    """The rows `low:high` of a spelling table, all beginning with the same `depth` symbols."""

    low: int
    high: int
    depth: int


@dataclass(frozen=True, eq=False)
class Spellings:
    """Tokens of one vocabulary in base symbols, sorted by spelling."""

    ids: Ints  # [n] token ids in the order of their spellings
    offsets: Ints  # [n + 1] into `symbols`
    symbols: Ints  # the spellings, one after the other
    base: int  # how many base symbols there are
    split: Bools  # [n] whether the spelling takes a draft token apart

    @cached_property
    def root(self) -> Node:
        """The node of all spellings."""
        return Node(0, len(self.ids), 0)

    @cached_property
    def starts(self) -> Ints:
        """[base + 1]: row at which the spellings that begin with a symbol start."""
        return np.searchsorted(self.first, np.arange(self.base + 1)).astype(np.int32)

    @cached_property
    def first(self) -> Ints:
        """[n]: the symbol that each spelling begins with."""
        return self.symbols[self.offsets[:-1]]

    @cached_property
    def first_of(self) -> NDArray[np.intp]:
        """[widest id + 1]: the same by token id, `base` for a token without a row."""
        return np.append(self.first, self.base).astype(np.intp)[self.row_of]

    @cached_property
    def row_of(self) -> Ints:
        """[widest id + 1]: a token's row, -1 where it has none."""
        rows = np.full(int(self.ids.max(initial=-1)) + 1, -1, np.int32)
        rows[self.ids] = np.arange(len(self.ids))
        return rows

    def row(self, token: int) -> int:
        """The token's row, or -1."""
        return int(self.row_of[token]) if token < len(self.row_of) else -1

    def spelling(self, row: int) -> tuple[int, ...]:
        """The symbols of a row."""
        return tuple(self.symbols[self.offsets[row] : self.offsets[row + 1]].tolist())

    def below(self, node: Node) -> Node:
        """`node` without the tokens that end at it; a drafter can have several of the same bytes."""
        low = node.low
        while low < node.high and self.offsets[low + 1] - self.offsets[low] == node.depth:
            low += 1
        return Node(low, node.high, node.depth)

    def child(self, node: Node, symbol: int) -> Node:
        """The rows that go on with `symbol`; an empty range where there are none."""
        if node.depth == 0:
            return Node(int(self.starts[symbol]), int(self.starts[symbol + 1]), 1)
        below = self.below(node)
        column = self.column(below)
        low, high = np.searchsorted(column, (symbol, symbol + 1))
        return Node(below.low + int(low), below.low + int(high), node.depth + 1)

    def column(self, below: Node) -> Ints:
        """The symbol that each row goes on with; `below` has no tokens that end at it."""
        return self.symbols[self.offsets[below.low : below.high] + below.depth]

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return sum(array.nbytes for array in (self.ids, self.offsets, self.symbols, self.split))


@dataclass(frozen=True, eq=False)
class Lexicon:
    """A pair's tokens in base symbols."""

    alignment: Alignment
    draft: Spellings
    target: Spellings
    token_of: Ints  # [base] the target token that a base symbol is

    @classmethod
    def build(cls, alignment: Alignment) -> Lexicon:
        """Spell every token of both vocabularies. Seconds for vocabularies of 150k."""
        direct = np.array(alignment.draft_to_target)
        token_of = np.unique(direct[direct >= 0]).astype(np.int32)
        symbol_of = {token: symbol for symbol, token in enumerate(token_of.tolist())}
        speller = _Speller(alignment, symbol_of)
        return cls(
            alignment,
            draft=_sorted(speller.draft_spellings(), len(token_of)),
            target=_sorted(speller.target_spellings(), len(token_of)),
            token_of=token_of,
        )

    @classmethod
    def cached(cls, alignment: Alignment, folder: Path) -> Lexicon:
        """The lexicon of a pair from `folder`, built and kept there the first time."""
        path = cls.file(alignment, folder)
        if path.exists():
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                    return cls._of_arrays(alignment, dict(arrays))
            except (OSError, ValueError, KeyError, EOFError, BadZipFile):
                path.unlink(missing_ok=True)  # cut off or damaged; it can be built again
        lexicon = cls.build(alignment)
        if len(lexicon.target.ids) > _WORTH_KEEPING:
            try:
                lexicon._keep(path)
            except (
                OSError
            ) as error:  # a cache that is read-only, or full: slower the next time, and nothing worse
                _log.warning("%s cannot be written (%s): it will be built again", path, error.strerror)
        return lexicon

    def _keep(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            with part.open("wb") as written:
                np.savez(written, **self._arrays())  # type: ignore[arg-type]
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def file(alignment: Alignment, folder: Path) -> Path:
        """Where `cached` keeps the lexicon of a pair."""
        name = f"{alignment.draft.fingerprint[:16]}-{alignment.target.fingerprint[:16]}-{_TABLE_VERSION}.npz"
        return folder / name

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"token_of": self.token_of} | {
            f"{side}_{name}": getattr(getattr(self, side), name)
            for side in ("draft", "target")
            for name in _ARRAYS
        }

    @classmethod
    def _of_arrays(cls, alignment: Alignment, arrays: dict[str, NDArray[Any]]) -> Lexicon:
        def side(name: str) -> Spellings:
            return Spellings(
                **{array: arrays[f"{name}_{array}"] for array in _ARRAYS}, base=len(arrays["token_of"])
            )

        return cls(alignment, side("draft"), side("target"), arrays["token_of"])

    def usable(self, splits: bool) -> Bools:
        """[V_draft]: the draft tokens that base symbols spell; without `splits`, only base symbols themselves."""
        usable = np.zeros(self.alignment.draft.width, np.bool_)
        usable[self.draft.ids[slice(None) if splits else ~self.draft.split]] = True
        return usable

    def piece(self, symbol: int) -> bytes:
        """The bytes a base symbol stands for."""
        return self.alignment.target.pieces[int(self.token_of[symbol])]

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return self.draft.nbytes + self.target.nbytes + self.token_of.nbytes


_ARRAYS = ("ids", "offsets", "symbols", "split")
_WORTH_KEEPING = 10_000  # tokens; a smaller table is built in a moment


_Spelled = tuple[tuple[int, ...], int, bool]


class _Speller:
    """Spells tokens in base symbols; a spelling is None where no symbols stand for the bytes."""

    def __init__(self, alignment: Alignment, symbol_of: dict[int, int]) -> None:
        self.alignment = alignment
        self.symbol_of = symbol_of
        self._draft: dict[int, tuple[int, ...] | None] = {}
        self._target: dict[int, tuple[int, ...] | None] = {}

    def draft_spellings(self) -> list[_Spelled]:
        """(spelling, draft id, whether it is a split) of each draft token that has one."""
        mapped = self.alignment.draft_to_target
        spelled: list[_Spelled] = []
        for id, piece in enumerate(self.alignment.draft.pieces):
            if mapped[id] >= 0:
                spelled.append(((self.symbol_of[mapped[id]],), id, False))
            elif piece and (symbols := self._spell_draft(id)):
                spelled.append((symbols, id, True))
        return spelled

    def target_spellings(self) -> list[_Spelled]:
        """(spelling, target id, whether it takes a draft token apart) of each target token that can be reached."""
        target, mapped = self.alignment.target, self.alignment.draft_to_target
        spelled: list[_Spelled] = [((symbol,), id, False) for id, symbol in self.symbol_of.items()]
        # Of several ids with the same bytes only the canonical one can have the spelling.
        ids = [id for piece, id in target.id_of.items() if id not in self.symbol_of]
        for id, tokens in zip(ids, self._encode(target, ids), strict=True):
            if symbols := self._spell_target(id, tokens):
                spelled.append((symbols, id, any(mapped[token] < 0 for token in tokens)))
        return spelled

    def _encode(self, target: Vocab, ids: Sequence[int]) -> list[list[int]]:
        return self.alignment.draft.encode_many([target.pieces[id] for id in ids])

    def _spell_draft(self, id: int) -> tuple[int, ...] | None:
        """By the target's tokens for its bytes, each of them shorter than the whole: so this comes to an end."""
        if id not in self._draft:
            target = self.alignment.target
            piece = self.alignment.draft.pieces[id]
            tokens = target.encode_bytes(piece)
            self._draft[id] = (
                _join(
                    (self.symbol_of[token],) if token in self.symbol_of else self._spell_target(token)
                    for token in tokens
                )
                if target.decode(tokens) == piece
                else None
            )
        return self._draft[id]

    def _spell_target(self, id: int, tokens: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """By the drafter's tokens for its bytes, split where they have no counterpart."""
        if id not in self._target:
            draft, mapped = self.alignment.draft, self.alignment.draft_to_target
            piece = self.alignment.target.pieces[id]
            tokens = draft.encode_bytes(piece) if tokens is None else tokens
            self._target[id] = (
                _join(
                    (self.symbol_of[mapped[token]],) if mapped[token] >= 0 else self._spell_draft(token)
                    for token in tokens
                )
                if draft.decode(tokens) == piece
                else None
            )
        return self._target[id]


def _join(parts: Iterable[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    whole: tuple[int, ...] = ()
    for part in parts:
        if part is None:
            return None
        whole += part
    return whole


def _sorted(spelled: list[_Spelled], base: int) -> Spellings:
    spelled.sort()
    lengths = [0, *(len(symbols) for symbols, _, _ in spelled)]
    return Spellings(
        ids=np.array([id for _, id, _ in spelled], np.int32),
        offsets=np.cumsum(lengths, dtype=np.int32),
        symbols=np.array([symbol for symbols, _, _ in spelled for symbol in symbols], np.int32),
        base=base,
        split=np.array([split for _, _, split in spelled], np.bool_),
    )
