"""The law of three tokens of a real pair, by chi-square: SmolLM2 drafts for Qwen2.5-Coder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats
from test_law import forgets_the_split
from toy import ToySession

from omnidraft import OmniDraft
from omnidraft.sampling import Sampling, law
from omnidraft.session import Model, feed
from omnidraft.types import Row

pytestmark = pytest.mark.models

# Few continuations are likely. Of the first most are n-grams: `):\n` of the target is `):`, `\n` of the drafter.
PROMPTS = ["for i in range(10", "1, 2, 3, 4,"]
SAMPLINGS = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
FULL = list(product(PROMPTS, SAMPLINGS))
ALPHA = 0.001 / len(FULL)  # of each test, so that all are passed at 0.001
TOKENS = 3
_KEPT = 2000  # rows of a model: 1.2 GB of Qwen2.5's


class Remembered:
    """A model that runs once for each context, and remembers the row."""

    def __init__(self, model: Model) -> None:
        self.name = model.name
        self.context_length = model.context_length
        self.vocab = model.vocab
        self.encode = model.encode
        self.passes = 0
        self._session = model.session()
        self._rows: dict[tuple[int, ...], Row] = {}  # least recently used first

    def session(self) -> ToySession:
        return LazySession(self)  # type: ignore[arg-type]

    def row(self, context: Sequence[int]) -> Row:
        """Logits after `context`. [V] float32"""
        key = tuple(context)
        row = self._rows.pop(key, None)
        if row is None:
            row = feed(self._session, key, rows=1)[0]
            self.passes += 1
        self._rows[key] = row
        if len(self._rows) > _KEPT:
            del self._rows[next(iter(self._rows))]
        return row


class LazySession(ToySession):
    """Rows are worked out when they are looked at: those behind a rejection never."""

    def extend(self, tokens: Sequence[int], rows: int) -> Any:
        self.tokens.extend(tokens)
        ends = range(len(self.tokens) - rows + 1, len(self.tokens) + 1)
        return LazyRows(self._model.row, [self.tokens[:end] for end in ends])


class LazyRows:
    def __init__(self, row: Callable[[Sequence[int]], Row], contexts: list[Sequence[int]]) -> None:
        self._row = row
        self._contexts = contexts

    def __getitem__(self, i: int) -> Row:
        return self._row(self._contexts[i])


@pytest.fixture(scope="module")
def pair(qwen: Model, drafter: Model) -> OmniDraft:
    return OmniDraft(Remembered(qwen), Remembered(drafter))  # type: ignore[arg-type]


def likely_answers(
    model: OmniDraft, prompt: str, sampling: Sampling, least: float
) -> dict[tuple[int, ...], float]:
    """The answers of three tokens (fewer where one ends) that plain decoding gives this often at least."""
    context = model.target.encode(prompt)
    size, eos = model.target.vocab.size, model.target.vocab.eos
    likely: dict[tuple[int, ...], float] = {}

    def follow(start: tuple[int, ...], probability: float) -> None:
        if len(start) == TOKENS or (start and start[-1] in eos):
            likely[start] = probability
            return
        p = law(model.target.row([*context, *start])[:size], sampling).astype(np.float64)  # type: ignore[attr-defined]
        p *= probability / p.sum()
        for token in np.flatnonzero(p >= least).tolist():
            follow((*start, token), float(p[token]))

    follow((), 1.0)
    return likely


def p_value(model: OmniDraft, prompt: str, sampling: dict[str, float], draws: int) -> float:
    """How likely the answers drawn would lie so far from the target's law, if they followed it."""
    likely = likely_answers(model, prompt, Sampling(**sampling), least=5 / draws)  # type: ignore[arg-type]
    counts = Counter(
        model.generate(
            prompt,
            raw=True,
            method="prefill",
            verification="trie",
            k=TOKENS,
            max_tokens=TOKENS,
            seed=seed,
            **sampling,
        ).tokens
        for seed in range(draws)
    )
    observed = [counts[answer] for answer in likely]
    expected = [probability * draws for probability in likely.values()]
    others = draws - sum(expected)
    if others >= 5:
        observed.append(draws - sum(observed))
        expected.append(others)
    else:  # too few to be a cell of their own
        observed[-1] += draws - sum(observed)
        expected[-1] += others
    return float(stats.chisquare(observed, expected).pvalue)


def test_two_thousand_answers_follow_the_target_s_law(pair: OmniDraft) -> None:
    assert p_value(pair, *FULL[0], draws=2000) > ALPHA


def test_a_planted_bug_fails_the_same_comparison(pair: OmniDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_the_split(monkeypatch)
    assert p_value(pair, *FULL[0], draws=500) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize(("prompt", "sampling"), FULL)
def test_twenty_thousand_answers_follow_the_target_s_law(
    pair: OmniDraft, prompt: str, sampling: dict[str, float]
) -> None:
    p = p_value(pair, prompt, sampling, draws=20_000)
    print(f"p = {p:.3g} for {prompt!r}, {sampling}")
    assert p > ALPHA
