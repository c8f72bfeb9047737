"""Judging a sentence of the form "this is better than that"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnidraft.experiments import statistics
from omnidraft.experiments.experiment import Claim, Measured, Verdict
from omnidraft.experiments.results import Results

Setting = dict[str, Any]
ALIKE = ("target", "task", "train", "tokens", "k")  # fields in which what is compared must be the same


def more_tokens(
    text: str,
    better: Setting,
    worse: Setting,
    *,
    over: Sequence[str] = ALIKE,
    least: float = 1.0,
) -> Claim:
    """A claim that one setting makes more tokens a step than another, pooled over what both were measured on.

    `least`: the ratio that must be exceeded.
    """

    def judge(results: Results) -> tuple[Verdict, str] | None:
        pair = pooled(results, better, worse, over)
        if pair is None:
            return None
        found = statistics.ratio(*pair)
        verdict = statistics.above(found, statistics.exactly(least))
        size = f"prompts: {statistics.prompts(pair[0])}, seeds: {len(pair[0])}"
        return verdict, f"{found.text()} times the tokens a step; {size}"

    return Claim(text, judge)


def pooled(
    results: Results, one: Setting, other: Setting, over: Sequence[str]
) -> tuple[list[Measured], list[Measured]] | None:
    """What both settings were measured on, side by side: a list of prompts a seed; None where there is nothing."""
    sides = [dict(results.groups(*over, "seed", **setting)) for setting in (one, other)]
    unseeded = [{key[:-1]: runs for key, runs in side.items() if key[-1] is None} for side in sides]
    seeds = sorted({key[-1] for side in sides for key in side if key[-1] is not None}) or [None]
    shared: list[tuple[Measured, Measured]] = []
    for seed in seeds:
        found = [
            {key[:-1]: runs for key, runs in side.items() if key[-1] == seed} | plain
            for side, plain in zip(sides, unseeded, strict=True)
        ]
        pairs = [_paired(found[0][key][0], found[1][key][0]) for key in found[0] if key in found[1]]
        if pairs:
            shared.append((_joined([a for a, _ in pairs]), _joined([b for _, b in pairs])))
    whole = [pair for pair in shared if len(pair[0]["tokens"]) == len(shared[0][0]["tokens"])]
    return ([a for a, _ in whole], [b for _, b in whole]) if whole else None


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """What all say; undecided where they differ."""
    return verdicts[0] if len(set(verdicts)) == 1 else "undecided"


def _paired(one: Measured, other: Measured) -> tuple[Measured, Measured]:
    """Of the prompts that both have: those of a task are always its first."""
    count = min(len(one["tokens"]), len(other["tokens"]))
    first, second = ({name: values[:count] for name, values in run.items()} for run in (one, other))
    return first, second


def _joined(runs: Sequence[Measured]) -> Measured:
    names = set.intersection(*(set(run) for run in runs))
    return {name: [value for run in runs for value in run[name]] for name in sorted(names)}
