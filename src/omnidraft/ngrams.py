"""The n-grams that are known, and what the drafter says of them: the trie that proposals and the rule walk."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnidraft.errors import NGramFileError
from omnidraft.ngram_files import FORMAT, VERSION, check, read_ngrams, write_ngrams
from omnidraft.spellings import Bools, Ints, Lexicon, Node, Spellings
from omnidraft.types import Row

Eviction = Literal["lfu", "lru"]


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
            "format": FORMAT,
            "version": VERSION,
            "drafter": {"name": drafter, "fingerprint": alignment.draft.fingerprint},
            "target": {"name": target, "fingerprint": alignment.target.fingerprint},
            "entries": [entry | {"recency": rank[entry["token"]]} for entry in self.entries()],
        }

    def save(self, path: Path, *, drafter: str, target: str) -> None:
        """Write the record to a file, replacing it in one step.

        Raises:
            NGramFileError: the file cannot be written; one that was there stays as it was.
        """
        write_ngrams(self.record(drafter=drafter, target=target), path)

    def load(self, path: Path) -> None:
        """Know the n-grams of a file too.

        Raises:
            NGramFileError: not such a file, a damaged one, a newer version, or one of another pair.
        """
        self.insert_record(read_ngrams(path), path)

    def insert_record(self, record: Any, source: str | Path) -> None:
        """Know the n-grams of a record too; `source` says in errors where it is from. Errors as for `load`."""
        check(record, source)
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
