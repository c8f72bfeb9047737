"""What a target has done since the server started; counts only what was shown."""

from __future__ import annotations

from collections import Counter
from heapq import nlargest
from itertools import islice
from typing import Any

from omnidraft.engine import OmniDraft
from omnidraft.stats import Stats
from omnidraft.types import Step

_FADE = 0.95  # weight of what was known, against a new plain step
_LISTED = 20  # n-grams named


class Histogram:
    """Counts of seconds, as Prometheus keeps them."""

    bounds = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[sum(seconds > bound for bound in self.bounds)] += 1
        self.sum += seconds


class Counters:
    """Written by the worker alone; others may read at any time."""

    def __init__(self, model: OmniDraft) -> None:
        self.stats = Stats()
        self.prompt_tokens = 0
        self.cached_tokens = 0  # of those, found in a KV cache
        self.drafts = 0
        self.proposed = 0
        self.accepted = 0
        self.accepted_at: list[int] = []  # by position in the proposal
        self.draft_length = 0  # tokens drafted in the last step
        self.finished: Counter[str] = Counter()  # by reason
        self.first_token = Histogram()
        self.whole = Histogram()
        self.ngrams: dict[
            int, int
        ] = {}  # target token of several symbols -> times accepted; in order of meeting
        self._model = model
        self._tokens, self._seconds = 0, 0.0  # of steps without a prompt's pass
        self._plain_seconds: float | None = None  # of a step that drafted nothing

    def begin(self, prompt: int, cached: int) -> None:
        """An answer begins."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def add(self, step: Step, first: bool) -> None:
        """Count a Step; the `first` of an answer may have some of the prompt in its pass."""
        self.stats.add(step)
        proposed = len(step.proposal.tokens)
        self.draft_length = len(step.draft.tokens) or proposed  # a look-up drafts target tokens
        self.drafts += proposed > 0
        self.proposed += proposed
        self.accepted += step.accepted
        self.accepted_at += [0] * (step.accepted - len(self.accepted_at))
        for i in range(step.accepted):
            self.accepted_at[i] += 1
        if step.accepted and step.draft.tokens:
            self._meet(step.tokens[: step.accepted])
        if first:
            return
        self._tokens += len(step.tokens)
        self._seconds += step.seconds
        if not proposed and not self.draft_length:
            known = self._plain_seconds
            self._plain_seconds = (
                step.seconds if known is None else _FADE * known + (1 - _FADE) * step.seconds
            )

    def _meet(self, tokens: tuple[int, ...]) -> None:
        table = self._model.lexicon.target
        for token in tokens:
            row = table.row(token)
            if row >= 0 and table.offsets[row + 1] - table.offsets[row] > 1:
                self.ngrams[token] = self.ngrams.get(token, 0) + 1

    @property
    def tokens_per_second(self) -> float | None:
        """While decoding, prompts' passes left out; None before any."""
        return self._tokens / self._seconds if self._seconds else None

    @property
    def plain_tokens_per_second(self) -> float | None:
        """By what steps without a draft have taken; None before there was one."""
        return 1 / self._plain_seconds if self._plain_seconds else None

    @property
    def speedup(self) -> float | None:
        """Tokens a second against plain decoding, estimated; None while the latter is not known."""
        ours, plain = self.tokens_per_second, self.plain_tokens_per_second
        return ours / plain if ours and plain else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, for the status page."""
        return {
            "requests": dict(self.finished),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.stats.tokens,
            "steps": self.stats.steps,
            "drafted": self.proposed,
            "accepted": self.accepted,
            "acceptance_rate": self.stats.acceptance_rate,
            "tokens_per_step": self.stats.tokens_per_step,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speedup": self.speedup,
            "draft_length": self.draft_length,
        }

    def ngrams_as_dict(self) -> dict[str, Any]:
        """How many n-grams were accepted so far, the most used and the newest."""
        known = dict(self.ngrams)  # the worker may meet another meanwhile
        most = nlargest(_LISTED, known, key=lambda token: known[token])
        newest = list(islice(reversed(known), _LISTED))
        return {
            "entries": len(known),
            "most_used": [self._ngram(token, known) for token in most],
            "newest": [self._ngram(token, known) for token in newest],
        }

    def _ngram(self, token: int, known: dict[int, int]) -> dict[str, Any]:
        piece = self._model.target.vocab.pieces[token]
        return {"text": piece.decode("utf-8", "replace"), "uses": known[token]}
