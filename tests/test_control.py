"""The policy of how much to draft, on models whose costs are given: time is simulated, decoding is real."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft
from omnidraft.control import Adaptive, Control, Fixed
from omnidraft.types import Draft, Proposal, Step

Costs = Callable[[int], float]  # tokens of a pass -> its cost
FLAT: Costs = lambda m: 1.0 + 0.02 * m  # noqa: E731
STEEP: Costs = lambda m: 0.3 + 0.7 * m  # noqa: E731


def step_of(k: int, chance: float, cost: Costs, draft: float, dice: random.Random) -> Step:
    accepted = 0
    while accepted < k and dice.random() < chance:
        accepted += 1
    drafting, verifying = k * draft, cost(k + 1)
    return Step(
        Draft((0,) * k), Proposal((0,) * k), (0,) * (accepted + 1), accepted, np.empty((0, 0)),
        drafting, verifying, drafting + verifying + (0.02 if k else 0.0),
    )  # fmt: skip


def speed(control: Control, tokens: int, chance: float, cost: Costs, draft: float, seed: int = 0) -> float:
    """Tokens a second over plain decoding's."""
    dice = random.Random(seed)
    written, seconds = 0, 0.0
    while written < tokens:
        step = step_of(control.length(), chance, cost, draft, dice)
        control.saw(step, first=False)
        written += len(step.tokens)
        seconds += step.seconds
    return written / seconds * cost(1)


@pytest.mark.parametrize("cost", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("draft", [0.05, 0.3])
def test_a_useless_drafter_costs_next_to_nothing(cost: Costs, draft: float) -> None:
    assert speed(Adaptive(8), 600, 0.02, cost, draft) > 0.97
    # The fault that this must not have: drafting that makes it slower, and goes on.
    assert speed(Fixed(8), 600, 0.02, cost, draft) < 0.8


@pytest.mark.parametrize("chance", [0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft", [0.05, 0.3])
def test_it_comes_near_the_best_fixed_length(chance: float, draft: float) -> None:
    best = max(speed(Fixed(k), 3000, chance, FLAT, draft) for k in range(9))
    assert speed(Adaptive(8), 3000, chance, FLAT, draft) > 0.93 * best


def test_drafting_is_on_again_soon_after_a_useless_phase_ends() -> None:
    waits = []
    for seed in range(20):
        control, dice = Adaptive(8), random.Random(seed)
        for _ in range(600):
            control.saw(step_of(control.length(), 0.0, FLAT, 0.05, dice), first=False)
        assert control.length() == 0 or control._plain
        waits.append(0)
        while control.length() < 4:
            step = step_of(control.length(), 0.9, FLAT, 0.05, dice)
            control.saw(step, first=False)
            waits[-1] += len(step.tokens)
    # One probe in ten is unlucky, and then the next decides.
    assert sorted(waits)[15] < 100
    assert max(waits) < 300


def test_answers_do_not_depend_on_it() -> None:
    target = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
    drafter = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)
    plain, model = OmniDraft(target, None), OmniDraft(target, drafter)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        for prompt in ("the flake", "a stone lay"):
            expected = plain.generate(prompt, max_tokens=60, method="plain", **options)
            assert model.generate(prompt, max_tokens=60, adaptive=True, **options).tokens == expected.tokens
    assert model._controls, "it was not asked"
