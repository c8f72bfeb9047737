"""Look-up drafting: what came after the same tokens before is proposed again; no model is asked."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from omnidraft.types import Draft, Proposal, Tokens, as_tokens

_RUNS = (8, 4, 2)  # tokens of the runs that are found again, the longest first
_FARTHEST = 32  # tokens that a match is followed back; a longer one says no more
END = -1  # stands in a History where a sequence ends
_CONTEXT = 1 << 15  # latest tokens of a context that are looked through


class History:
    """Token sequences one behind another, and where each run of 2, 4 and 8 tokens in them was last.

    Where a run ended is kept in tables of fixed size by the run's hash, as compressors do: of runs that collide the
    latest stays, and what is found is compared. So memory is bounded, and a token costs the same at any length.
    """

    def __init__(self, limit: int, tokens: Iterable[int] = ()) -> None:
        """`limit`: tokens kept, at most 28 bytes each; beyond it the older half goes. `tokens`: of another History."""
        self._limit = limit
        self._mask = (1 << (limit - 1).bit_length()) - 1
        self._fill(tokens)

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return sum(block.itemsize * len(block) for block in (self.tokens, *self._ends.values()))

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the last sequence."""
        for token in tokens:
            if token != END:
                for length, ends in self._ends.items():  # of a run only what came after it is of use
                    ends[self._slot(self.tokens[-length:])] = len(self.tokens)
            self.tokens.append(token)
        if len(self.tokens) > self._limit:
            self._fill(self.tokens[-self._limit // 2 :])

    def add(self, tokens: Iterable[int]) -> None:
        """One more sequence, whole."""
        self.extend(tokens)
        self.extend((END,))

    def find(self, context: Tokens[int]) -> tuple[int, int]:
        """Where in `tokens` the end of `context` was before, and how many tokens are the same; (0, 0) for nowhere."""
        for length, ends in self._ends.items():
            end = ends[self._slot(context[-length:])]
            if length <= end and self.tokens[end - length : end] == context[-length:]:
                farthest = min(end, len(context), _FARTHEST)
                while length < farthest and self.tokens[end - length - 1] == context[-length - 1]:
                    length += 1
                return end, length
        return 0, 0

    def _fill(self, tokens: Iterable[int]) -> None:
        self.tokens = as_tokens()
        self._ends = {length: array("i", [0]) * (self._mask + 1) for length in _RUNS}
        self.extend(tokens)

    def _slot(self, run: Tokens[int]) -> int:
        return hash(tuple(run)) & self._mask


class Lookup:
    """Drafts for one answer out of its prompt, what it says so far, and a history of earlier answers."""

    def __init__(self, history: History | None = None) -> None:
        self._context = History(_CONTEXT)
        self._seen = 0  # tokens of the context that are in it
        self._history = history
        self._source, self._end = self._context, 0  # of the latest match

    def match(self, context: Tokens[int]) -> int:
        """How many tokens at the end of `context` came in this order before, as far as that is known; 0 for none.

        What other answers said is worth half: those tokens come again in them for more reasons (docs/decisions.md).
        """
        self._context.extend(context[self._seen :])
        self._seen = len(context)
        self._source = self._context
        self._end, matched = self._context.find(context)
        if self._history and (found := self._history.find(context))[1] // 2 > matched:
            self._source, self._end, matched = self._history, found[0], found[1] // 2
        return matched

    def propose(self, context: Sequence[int], k: int) -> tuple[Draft, Proposal]:
        """The k tokens, or fewer, that came after the latest `match`; where those are the end of the context
        itself, it is taken to repeat."""
        known, at = self._source.tokens, self._end
        tokens: list[int] = []
        while len(tokens) < k:
            token = known[at] if at < len(known) else tokens[at - len(known)]
            if token == END:
                break
            tokens.append(token)
            at += 1
        return Draft(()), Proposal(tuple(tokens), source="lookup")
