"""Target tokens as n-grams of the drafter's: how they are spelled, which are known, what the drafter says of them.

A *base symbol* is a target token that the drafter has too, byte for byte. Everything else is spelled in base
symbols: a target token by the drafter's tokens for its bytes (an n-gram), a draft token without counterpart by
the target's tokens for its bytes (a split). Sorted by spelling, all tokens that begin alike stand side by side;
so a node of the trie is a range of rows, and no tree is ever built.
"""

from __future__ import annotations

import copy
import csv
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from omnidraft.errors import NGramFileError
from omnidraft.types import Row
from omnidraft.vocab import Alignment, Vocab

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Eviction = Literal["lfu", "lru"]

_log = logging.getLogger(__name__)
_FORMAT = "omnidraft n-grams"
_VERSION = 1
_TABLE_VERSION = 2  # of spelling tables on disk; a table of another version is built anew


class Node(NamedTuple):
    """The rows `low:high` of a spelling table, all beginning with the same `depth` symbols."""

    low: int
    high: int
    depth: int


class Branches(NamedTuple):
    """The choices at a node of the trie: its symbols and, as one more, what is no symbol.

    That is STOP; at the root it is all of the target's tokens outside the trie together.
    """

    symbols: NDArray[np.integer[Any]]  # [b]
    tokens: NDArray[np.integer[Any]]  # [t] those at or below the node; at the root all of the target's
    branch: NDArray[np.intp]  # [t] index of the choice that leads to each token, b for the last

    def masses(
        self,
        p: Row,  # [V_target], without ids that only pad
    ) -> Row:
        """The probability of all tokens that each choice leads to. [b + 1] float64"""
        everything = len(self.tokens) == len(p)  # at the root: nothing to gather
        return _sums(self.branch, p if everything else p[self.tokens], len(self.symbols) + 1)


def _sums(index: NDArray[np.integer[Any]], weights: Row, length: int) -> Row:
    """The sum of the weights at each index. [length] float64"""
    sums: Row = np.bincount(index, weights, length)  # type: ignore[assignment]
    return sums


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


class Trie:
    """The target tokens a draft can become: every base symbol, and the n-grams known so far.

    Members change by `insert` and eviction only, never while a step is in progress.
    """

    def __init__(
        self,
        lexicon: Lexicon,
        *,
        splits: bool = True,
        capacity: int | None = None,
        eviction: Eviction = "lfu",
    ) -> None:
        """`capacity`: n-grams kept at most; None keeps all. `splits`: whether draft tokens are taken apart."""
        self.lexicon = lexicon
        self.splits = splits
        self.capacity = capacity
        self.eviction = eviction
        self.uses: dict[int, int] = {}  # n-gram (target id) -> accepted uses, least recently used first
        self._table = lexicon.target
        lengths = np.diff(self._table.offsets)
        self._member: Bools = lengths == 1
        self._eligible: Bools = (lengths > 1) & (~self._table.split | splits)

    def fill(self) -> None:
        """Make every target token that has a spelling a member, whatever the capacity (method `prefill`)."""
        self._member |= self._eligible
        self._changed()

    def insert(self, tokens: Iterable[int]) -> None:
        """Know these verified target tokens from now on; those without an n-gram spelling are passed over."""
        for token in tokens:
            row = self._table.row(token)
            if row >= 0 and self._eligible[row] and not self._member[row]:
                self._member[row] = True
                self.uses[token] = 0
                self._changed()
        if self.capacity is not None and len(self.uses) > self.capacity:
            self._evict(self.capacity)

    def snapshot(self) -> Trie:
        """The trie as it is now; what is met later does not enter it."""
        trie = copy.copy(self)
        trie._member, trie.uses = self._member.copy(), dict(self.uses)
        return trie

    def use(self, token: int) -> None:
        """Count an accepted use of an n-gram."""
        self.uses[token] = self.uses.pop(token, 0) + 1

    def _evict(self, capacity: int) -> None:
        """Make room for a sixteenth more than needed, so that not every insertion has to sort."""
        surplus = len(self.uses) - capacity + capacity // 16
        order = sorted(self.uses, key=lambda token: self.uses[token]) if self.eviction == "lfu" else self.uses
        for token in list(order)[:surplus]:
            del self.uses[token]
            self._member[self._table.row(token)] = False
        self._changed()

    def _changed(self) -> None:
        self.__dict__.pop("_at_root", None)

    def __len__(self) -> int:
        """How many n-grams are known."""
        return int(np.count_nonzero(self._member)) - self._table.base

    @property
    def nbytes(self) -> int:
        """Memory held beside the lexicon, bytes."""
        return self._member.nbytes + self._eligible.nbytes + sys.getsizeof(self.uses)

    # The walk

    @cached_property
    def _at_root(self) -> Branches:
        """`branches` of the root, where nearly every correction is drawn; until a member changes."""
        table, size = self._table, self.lexicon.alignment.target.size
        branch = np.full(size, table.base)
        branch[table.ids[self._member]] = table.first[self._member]
        return Branches(np.arange(table.base), np.arange(size), branch)

    @property
    def root(self) -> Node:
        """The node of all tokens of the trie."""
        return self._table.root

    def child(self, node: Node, symbol: int) -> Node | None:
        """The node that `symbol` leads to, or None where no known token goes on so."""
        child = self._table.child(node, symbol)
        return child if self._member[child.low : child.high].any() else None

    def find(self, symbols: Iterable[int]) -> Node | None:
        """The node of these symbols, or None where no known token begins so."""
        node: Node | None = self.root
        for symbol in symbols:
            node = self.child(node, symbol) if node else None
        return node

    def spelling(self, token: int) -> tuple[int, ...]:
        """The symbols of a known token; none of another."""
        row = self._table.row(token)
        return self._table.spelling(row) if row >= 0 and self._member[row] else ()

    def own(self, node: Node) -> int | None:
        """The token that ends at `node`."""
        ends = self._table.below(node).low > node.low and self._member[node.low]
        return int(self._table.ids[node.low]) if ends else None

    def is_leaf(self, node: Node) -> bool:
        """Whether no known token goes on from here."""
        below = self._table.below(node)
        return not self._member[below.low : below.high].any()

    def tokens(self, node: Node) -> Ints:
        """The known tokens at or below `node`."""
        rows = slice(node.low, node.high)
        return self._table.ids[rows][self._member[rows]]

    def branches(self, node: Node) -> Branches:
        """What can come after `node`, and the tokens it leads to."""
        if node.depth == 0:
            return self._at_root
        below = self._table.below(node)
        column = self._table.column(below)[self._member[below.low : below.high]]
        new = np.diff(column, prepend=-1) != 0
        branch = np.cumsum(new) - 1
        symbols = column[new]
        if self.own(node) is not None:  # it stands before those that go on
            branch = np.concatenate(([len(symbols)], branch))
        return Branches(symbols, self.tokens(node), branch)

    def match(self, symbols: Sequence[int]) -> tuple[int, int]:
        """The longest known token that `symbols` begin with, and how many of them it takes."""
        node: Node | None = self.root
        token, length = -1, 0
        for depth, symbol in enumerate(symbols, start=1):
            node = self.child(node, symbol) if node else None
            if node is None:
                break
            if (own := self.own(node)) is not None:
                token, length = own, depth
        return token, length

    def walk(self, symbols: Sequence[int]) -> tuple[int, int]:
        """The token that the rule `trie` completes when it accepts all of `symbols`, and how many it takes.

        Unlike `match` it never steps back: where no known token goes on so and none ends here, the rule will
        reject, and there is no such token (length 0).
        """
        node = self.root
        for symbol in symbols:
            child = self.child(node, symbol)
            if child is None:
                break
            node = child
            if self.is_leaf(node):
                break
        own = self.own(node)
        return (own, node.depth) if own is not None else (-1, 0)

    # Files

    def entries(self) -> list[dict[str, Any]]:
        """The n-grams met, most used first: target id, its text, its symbols' texts, accepted uses."""
        target = self.lexicon.alignment.target
        return [
            {
                "token": token,
                "text": _text(target.pieces[token]),
                "symbols": [
                    _text(self.lexicon.piece(s)) for s in self._table.spelling(self._table.row(token))
                ],
                "uses": self.uses[token],
            }
            for token in sorted(self.uses, key=lambda token: -self.uses[token])
        ]

    def record(self, *, drafter: str, target: str) -> dict[str, Any]:
        """The n-grams met and their uses, as JSON. Names are for people."""
        alignment = self.lexicon.alignment
        rank = {token: at for at, token in enumerate(self.uses)}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "drafter": {"name": drafter, "fingerprint": alignment.draft.fingerprint},
            "target": {"name": target, "fingerprint": alignment.target.fingerprint},
            "entries": [entry | {"recency": rank[entry["token"]]} for entry in self.entries()],
        }

    def save(self, path: Path, *, drafter: str, target: str) -> None:
        """Write the record to a file, replacing it in one step.

        Raises:
            NGramFileError: the file cannot be written; one that was there stays as it was.
        """
        record = self.record(drafter=drafter, target=target)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise NGramFileError(
                f"{path} cannot be written ({error.strerror or error}); choose another file"
            ) from error

    def load(self, path: Path) -> None:
        """Know the n-grams of a file too.

        Raises:
            NGramFileError: not such a file, a damaged one, a newer version, or one of another pair.
        """
        self.insert_record(read_ngrams(path), path)

    def insert_record(self, record: Any, source: str | Path) -> None:
        """Know the n-grams of a record too; `source` says in errors where it is from. Errors as for `load`."""
        _check(record, source)
        alignment = self.lexicon.alignment
        for side, vocab in (("drafter", alignment.draft), ("target", alignment.target)):
            if record[side]["fingerprint"] != vocab.fingerprint:
                raise NGramFileError(
                    f"{source} holds n-grams of drafter {record['drafter']['name']} and target "
                    f"{record['target']['name']}, and this {side}'s vocabulary is another; "
                    "choose another file, or load that pair"
                )
        for entry in sorted(record["entries"], key=lambda entry: entry["recency"]):
            self.insert([entry["token"]])
            if entry["token"] in self.uses:
                self.uses[entry["token"]] = entry["uses"]


def read_ngrams(path: Path) -> dict[str, Any]:
    """An n-gram file as it was saved; errors as in `Trie.load`."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NGramFileError(f"{path} does not exist; check the name") from error
    except (OSError, ValueError) as error:
        raise _not_whole(path) from error
    _check(record, path)
    return record


def _check(record: Any, source: str | Path) -> None:
    """Raise NGramFileError for what is not the record of a trie."""
    try:
        if record["format"] != _FORMAT:
            raise KeyError("format")
        if record["version"] > _VERSION:
            raise NGramFileError(
                f"{source} was written by a newer version of omnidraft; update this one, or choose another file"
            )
        for side in ("drafter", "target"):
            record[side]["name"], record[side]["fingerprint"]
        for entry in record["entries"]:
            int(entry["token"]), int(entry["uses"]), int(entry["recency"])
            "".join([entry["text"], *entry["symbols"]])  # all of them texts
    except (ValueError, KeyError, TypeError) as error:
        raise _not_whole(source) from error


def _not_whole(source: str | Path) -> NGramFileError:
    return NGramFileError(f"{source} is not a whole n-gram file; choose another, or remove it if it was one")


def export_ngrams(record: dict[str, Any], path: Path) -> None:
    """Write a record's entries for other programs: CSV if `path` ends in .csv, else JSON lines.

    In CSV the symbols are one field, a JSON list.
    """
    names = ("token", "text", "symbols", "uses")
    rows = [{name: entry[name] for name in names} for entry in record["entries"]]
    # A lone surrogate, which only a file made by hand can hold, is escaped as JSON does.
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        if path.suffix.lower() == ".csv":
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                writer.writerow(row | {"symbols": json.dumps(row["symbols"], ensure_ascii=False)})
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "backslashreplace")


class SymbolLaw:
    """The drafter's law of the next base symbol: its row, pushed forward through the spellings.

    At the start of a draft token `node` is the root. After the first symbols of a split it is theirs, and the
    row is restricted to the draft tokens that go on.
    """

    def __init__(
        self,
        table: Spellings,  # of the drafter
        q: Row,  # [V_draft] probabilities, up to a factor; zero for unusable tokens
        node: Node | None = None,
    ) -> None:
        """`node`: what is known of the draft token."""
        self._table = table
        self._q = q
        self._node = node or table.root
        self._total = float(q.sum(dtype=np.float64)) if node is None else self._mass(self._node)
        self._without: NDArray[np.integer[Any]] = np.empty(
            0, np.int32
        )  # symbols that are known not to be next

    def below(self, symbol: int) -> SymbolLaw:
        """The law after `symbol`, when the draft token goes on: of the rest of its spelling."""
        return SymbolLaw(self._table, self._q, self._table.below(self._table.child(self._node, symbol)))

    def without(self, symbols: NDArray[np.integer[Any]]) -> SymbolLaw:
        """The law given that the next symbol is none of these."""
        law = copy.copy(self)
        law._without = symbols
        law._masses = self._masses.copy()
        law._masses[symbols] = 0
        law._total = float(law._masses.sum())
        return law

    def of(self, symbol: int) -> float:
        """The probability of a symbol."""
        if self._total <= 0 or symbol in self._without:
            return 0.0
        return self._mass(self._table.child(self._node, symbol)) / self._total

    def of_each(self, symbols: NDArray[np.integer[Any]]) -> Row:
        """The probability of each symbol. [len(symbols)] float64"""
        law: Row = self._masses[symbols] / (self._total or 1)
        return law

    @cached_property
    def _masses(self) -> Row:
        """[base]: of each symbol that can be next."""
        table = self._table
        if self._node.depth == 0:
            return _sums(table.first_of, self._q[: len(table.first_of)], table.base + 1)[:-1]
        below = table.below(self._node)
        return _sums(table.column(below), self._q[table.ids[below.low : below.high]], table.base)

    def _mass(self, node: Node) -> float:
        return float(self._q[self._table.ids[node.low : node.high]].sum(dtype=np.float64))
