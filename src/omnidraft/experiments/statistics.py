"""Numbers with intervals: 95 %, by bootstrap over prompts; what several seeds did to a prompt goes together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnidraft.experiments.experiment import Measured, Verdict

RESAMPLES = 2000


class Interval(NamedTuple):
    """A value and the interval that holds it."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".2f", unit: str = "") -> str:
        """For a table: `2.71 (2.60 to 2.83)`."""
        if self.low == self.high:
            return f"{self.value:{form}}{unit}"
        return f"{self.value:{form}}{unit} ({self.low:{form}} to {self.high:{form}})"


def tokens_per_step(runs: Sequence[Measured]) -> Interval:
    """Tokens of the answers a pass of the target; `runs`: one list of prompts a seed, `tokens` and `steps` of each."""
    return _bootstrapped(_sums(runs, "tokens"), _sums(runs, "steps"))


def per_step(runs: Sequence[Measured], name: str) -> Interval:
    """Something that was counted, a step."""
    return _bootstrapped(_sums(runs, name), _sums(runs, "steps"))


def ngram_acceptance(runs: Sequence[Measured]) -> Interval:
    """The share of the n-grams looked at that were accepted."""
    return _bootstrapped(_sums(runs, "ngram_hits"), _sums(runs, "ngrams_judged"))


def acceptance(runs: Sequence[Measured]) -> Interval:
    """Accepted of proposed target tokens, averaged over steps, then over prompts."""
    rates = np.array([[np.nan if a is None else a for a in run["acceptance"]] for run in runs], float)
    known = ~np.isnan(rates)
    return _bootstrapped(np.where(known, rates, 0).sum(0), known.sum(0))


def ratio(runs: Sequence[Measured], others: Sequence[Measured], *, per: str = "steps") -> Interval:
    """Tokens per step (or `per` another sum) of one side over the other's, paired by prompt."""
    own, base = ([_sums(side, name) for name in ("tokens", per)] for side in (runs, others))
    rows = _draws(len(own[0]))
    drawn = (own[0][rows].sum(1) / own[1][rows].sum(1)) / (base[0][rows].sum(1) / base[1][rows].sum(1))
    value = (own[0].sum() / own[1].sum()) / (base[0].sum() / base[1].sum())
    return Interval(float(value), *_limits(drawn))


def mean(values: Sequence[float]) -> Interval:
    """Of numbers, one a prompt."""
    array = np.array(values, float)
    return _bootstrapped(array, np.ones(len(array)))


def middle(values: Sequence[float]) -> Interval:
    """The median of numbers, one a prompt."""
    array = np.array(values, float)
    return Interval(float(np.median(array)), *_limits(np.median(array[_draws(len(array))], axis=1)))


def prompts(runs: Sequence[Measured]) -> int:
    """How many prompts are behind a number."""
    return len(runs[0]["tokens"]) if runs else 0


def share(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """The parts of the wholes, both one a prompt."""
    return _bootstrapped(np.array(parts, float), np.array(wholes, float))


def above(found: Interval, *others: Interval) -> Verdict:
    """Whether a value is above all the others beyond their intervals."""
    if all(found.low > other.high for other in others):
        return "confirmed"
    return "refuted" if any(found.high < other.low for other in others) else "undecided"


def exactly(value: float) -> Interval:
    """A number without an interval, to compare with."""
    return Interval(value, value, value)


def _sums(runs: Sequence[Measured], name: str) -> NDArray[np.float64]:
    """[prompts]: over seeds."""
    summed: NDArray[np.float64] = np.array([run[name] for run in runs], float).sum(0)
    return summed


def _bootstrapped(upper: NDArray[Any], lower: NDArray[Any]) -> Interval:
    """Of the ratio of two sums over prompts; none of none is 0."""
    rows = _draws(len(upper))
    drawn = upper[rows].sum(1) / np.maximum(lower[rows].sum(1), 1e-12)
    return Interval(float(upper.sum() / max(float(lower.sum()), 1e-12)), *_limits(drawn))


def _draws(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, (RESAMPLES, count))


def _limits(drawn: NDArray[Any]) -> tuple[float, float]:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)
