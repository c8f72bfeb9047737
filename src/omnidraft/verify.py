"""The rules: which of the proposed tokens enter the answer. Each but the paper's leaves the target's law as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

import numpy as np

from omnidraft.ngrams import SymbolLaw, Trie
from omnidraft.sampling import Sampler
from omnidraft.spellings import Node
from omnidraft.types import Draft, Proposal, Row, Verdict


class Rule(Protocol):
    """A way to verify. Rows are looked at lazily, and none after a token in `ends`."""

    needs_laws: bool  # whether drafts must be drawn, and their laws kept

    def __call__(
        self,
        rows: Iterable[Row],  # m + 1 rows of [V_target] float32 logits: the proposal's positions and the next
        draft: Draft,
        proposal: Proposal,
        sampler: Sampler,
        ends: Collection[int],
    ) -> Verdict: ...


class Compare:
    """Draw each position's token from the target and go on while it equals the proposed one (DESIGN 3a).

    The answer is the target's own draw at every position, so the law is exact for any proposal at every
    temperature; greedy is its limit.
    """

    needs_laws = False

    def __call__(
        self,
        rows: Iterable[Row],
        draft: Draft,
        proposal: Proposal,
        sampler: Sampler,
        ends: Collection[int],
    ) -> Verdict:
        """See `Rule`."""
        tokens: list[int] = []
        for row, proposed in zip(rows, (*proposal.tokens, None), strict=False):
            tokens.append(sampler.draw(row))
            if tokens[-1] != proposed:
                return Verdict(tuple(tokens), accepted=len(tokens) - 1)
            if tokens[-1] in ends:
                break
        return Verdict(tuple(tokens), accepted=len(tokens))


class Walk:
    """Accept drawn symbols by min(1, P/Q) along the trie (DESIGN 3b; docs/how-it-works.md has the proof).

    P is the target's law of the next base symbol: the mass of all tokens that begin so. Q is the law it was
    drawn from. Where a token ends inside the trie, STOP is a symbol too: all that cannot go on.
    """

    needs_laws = True

    def __init__(self, trie: Trie) -> None:
        self._trie = trie

    def __call__(
        self,
        rows: Iterable[Row],
        draft: Draft,
        proposal: Proposal,
        sampler: Sampler,
        ends: Collection[int],
    ) -> Verdict:
        """See `Rule`."""
        table = self._trie.lexicon.draft
        walk = _Walk(self._trie, iter(rows), sampler, ends)
        for token, law in zip(draft.tokens, draft.laws, strict=True):
            q = SymbolLaw(table, law)
            spelling = table.spelling(table.row(token))
            for depth, symbol in enumerate(spelling, start=1):
                if not walk.take(symbol, q):
                    return walk.verdict(proposal)
                if depth < len(spelling):
                    q = q.below(symbol)
        walk.finish()
        return walk.verdict(proposal)


class _Walk:
    """Where the walk along the drafted symbols has come to: a position of the answer and a node of the trie."""

    def __init__(self, trie: Trie, rows: Iterator[Row], sampler: Sampler, ends: Collection[int]) -> None:
        self._trie = trie
        self._rows = rows
        self._sampler = sampler
        self._ends = ends
        self._tokens: list[int] = []
        self._accepted = 0
        self._p: Row  # [size] the law of the token at this position, up to a factor
        self._node: Node  # what of it is accepted
        self._mass: float  # of `_p` at or below the node
        self._open()

    def verdict(self, proposal: Proposal) -> Verdict:
        # A proposal that was cut short leaves drafted symbols, which can complete one token more.
        return Verdict(tuple(self._tokens), accepted=min(self._accepted, len(proposal.tokens)))

    def take(self, symbol: int, q: SymbolLaw) -> bool:
        """Accept a symbol drawn from `q`, or draw the correction; whether the walk goes on."""
        trie = self._trie
        child = trie.child(self._node, symbol)
        if child is None:  # STOP, if a token ends here
            own = trie.own(self._node)
            going_on = trie.branches(self._node).symbols
            stop = float(self._p[own]) / self._mass if own is not None else 0.0
            if own is None or not self._accepts(stop, 1 - float(q.of_each(going_on).sum())):
                return self._correct(q)
            if not self._complete(own):
                return False
            # The symbol opens the next position. That it was none of `going_on` is known by now: to forget it
            # is the tokenisation bias.
            q = q.without(going_on)
            child = trie.child(self._node, symbol)
        if child is None:
            raise ValueError(f"symbol {symbol} is not a base symbol of this trie")
        mass = float(self._p[trie.tokens(child)].sum(dtype=np.float64))
        if not self._accepts(mass / self._mass, q.of(symbol)):
            return self._correct(q)
        self._node, self._mass = child, mass
        own = trie.own(child)
        return self._complete(own) if own is not None and trie.is_leaf(child) else True

    def finish(self) -> None:
        """The draft has ended: draw the free token, or the end of what was begun."""
        if self._node.depth:
            below = self._trie.tokens(self._node)
            token = int(below[self._sampler.noise.fresh(self._p[below])])
            if token != self._trie.own(self._node):
                self._settle(token)
                return
            if not self._complete(token):
                return
        self._settle(self._sampler.noise.fresh(self._p))

    def _open(self) -> bool:
        """Go to the next position; whether there is a row for it."""
        row = next(self._rows, None)
        if row is None:
            return False
        self._p = self._sampler.law(row)
        self._node = self._trie.root
        self._mass = float(self._p.sum(dtype=np.float64))
        return True

    def _accepts(self, p: float, q: float) -> bool:
        return p > 0 and (p >= q or self._sampler.accepts(p / q))

    def _complete(self, token: int) -> bool:
        """The proposed token is accepted; whether the answer goes on within this step."""
        self._settle(token)
        self._accepted += 1
        return token not in self._ends and self._open()

    def _settle(self, token: int) -> None:
        self._tokens.append(token)
        self._sampler.commit(token)

    def _correct(self, q: SymbolLaw) -> bool:
        """Draw a symbol from norm(max(0, P - Q)), then a token at or below it in proportion to p."""
        node, p = self._node, self._p
        branches = self._trie.branches(node)
        masses = branches.masses(p)
        law = np.append(q.of_each(branches.symbols), 0)
        if node.depth:  # STOP; at the root it is tokens outside the trie, which are never drafted
            law[-1] = max(0.0, 1 - law.sum())
        left = np.maximum(0, masses / self._mass - law)
        chosen = self._sampler.noise.fresh(left if left.any() else masses)  # P - Q may round to nothing
        pool = branches.tokens[branches.branch == chosen]
        self._settle(int(pool[self._sampler.noise.fresh(p[pool])]))
        return False


class Paper:
    """The paper's rule (its equations 1 and 2, algorithm 1): accept a token by min(1, p/q').

    An n-gram's q' is the product of its parts, and what its first part loses; every other token keeps q. That
    is an approximation, kept for the paper's tables: with n-grams the answer's law is not the target's.
    """

    needs_laws = True

    def __init__(self, trie: Trie) -> None:
        lexicon = trie.lexicon
        self._direct = np.flatnonzero(lexicon.usable(splits=False))
        self._target_of = np.array(lexicon.alignment.draft_to_target)[self._direct]

    def __call__(
        self,
        rows: Iterable[Row],
        draft: Draft,
        proposal: Proposal,
        sampler: Sampler,
        ends: Collection[int],
    ) -> Verdict:
        """See `Rule`."""
        tokens: list[int] = []
        laws = [law / law.sum(dtype=np.float64) for law in draft.laws]
        at = 0  # draft token
        remaining = iter(rows)
        for token, length in zip(proposal.tokens, proposal.lengths, strict=False):
            p = sampler.law(next(remaining))
            p = p / p.sum(dtype=np.float64)
            q = np.bincount(self._target_of, weights=laws[at][self._direct], minlength=len(p))
            if length > 1:
                parts = zip(laws[at : at + length], draft.tokens[at : at + length], strict=True)
                q[token] = np.prod([law[part] for law, part in parts])
                q[self._first(draft.tokens[at])] -= q[token]
            at += length
            if p[token] < q[token] and not sampler.accepts(p[token] / q[token]):
                residual = np.maximum(0, p - q)
                drawn = sampler.noise.fresh(residual if residual.sum() > 0 else p)
                sampler.commit(drawn)
                return Verdict((*tokens, drawn), accepted=len(tokens))
            tokens.append(token)
            sampler.commit(token)
            if token in ends:
                return Verdict(tuple(tokens), accepted=len(tokens))
        drawn = sampler.noise.fresh(sampler.law(next(remaining)))
        sampler.commit(drawn)
        return Verdict((*tokens, drawn), accepted=len(tokens))

    def _first(self, token: int) -> int:
        return int(self._target_of[np.searchsorted(self._direct, token)])
