"""The policy of what to draft with and how much: models cost and accept what they are told to, the last excepted."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft
from omnidraft.control import Adaptive, Control, Fixed
from omnidraft.types import Draft, Proposal, Source, Step

Costs = Callable[[int], float]  # tokens of a pass -> its cost
FLAT: Costs = lambda m: 1.0 + 0.02 * m  # noqa: E731
STEEP: Costs = lambda m: 0.3 + 0.7 * m  # noqa: E731
JUMP: Costs = lambda m: 1.0 + 0.05 * m + (1.0 if m > 4 else 0.0)  # noqa: E731


class World:
    """A target and a drafter that cost and accept what they are told to; `seconds` and `tokens` so far."""

    def __init__(self, cost: Costs, draft: float, *, noise: float = 0.0, seed: int = 0) -> None:
        self.cost, self.draft, self.noise = cost, draft, noise
        self.catch_up = 0.0  # seconds a token of context that the drafter has not seen
        self.lookup = 0.0  # the chance of a looked-up token
        self.matched = 0
        self.seconds, self.tokens, self.behind = 0.0, 0, 1
        self.chosen: list[tuple[Source, int]] = []
        self._dice = random.Random(seed)

    def step(self, control: Control, chance: float, *, first: bool = False) -> None:
        source, k = control.choose(99, self.matched, self.behind)
        self.chosen.append((source, k))
        chance = chance if source == "drafted" else self.lookup
        accepted = 0
        while accepted < k and self._dice.random() < chance:
            accepted += 1
        drafted = k if source == "drafted" else 0
        late = self.behind - 9 if drafted and self.behind > 9 else 0
        drafting = (drafted * self.draft + late * self.catch_up) * self._slow()
        verifying = self.cost(k + 1) * self._slow()
        step = Step(
            Draft((0,) * drafted), Proposal((0,) * k, source=source), (0,) * (accepted + 1), accepted,
            np.empty((0, 0)), drafting, verifying, drafting + verifying + (0.02 if k else 0.0),
        )  # fmt: skip
        control.saw(step, first)
        self.behind = len(step.tokens) + (0 if drafted else self.behind)
        self.seconds += step.seconds
        self.tokens += len(step.tokens)

    def speed(self, control: Control, tokens: int, chance: float) -> float:
        """Tokens a second over so many tokens."""
        seconds, begun = self.seconds, self.tokens
        while self.tokens < begun + tokens:
            self.step(control, chance)
        return (self.tokens - begun) / (self.seconds - seconds)

    def _slow(self) -> float:
        """What other processes do to a time."""
        if not self.noise:
            return 1.0
        return (1 + self.noise * abs(self._dice.gauss(0, 1))) * (2 if self._dice.random() < 0.05 else 1)


def relative(cost: Costs, draft: float, chance: float, tokens: int, noise: float, best_of: range) -> float:
    """The speed of the adaptive policy over that of the best fixed length, both means of several runs."""

    def speed(make: Callable[[], Control]) -> float:
        worlds = [World(cost, draft, noise=noise, seed=seed) for seed in range(3)]
        return float(np.mean([world.speed(make(), tokens, chance) for world in worlds]))

    return speed(lambda: Adaptive(8, 16)) / max(speed(lambda k=k: Fixed(k)) for k in best_of)  # type: ignore[misc]


@pytest.mark.parametrize("cost", [FLAT, STEEP, JUMP], ids=["flat", "steep", "jump"])
@pytest.mark.parametrize("draft", [0.05, 0.3])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_useless_drafter_costs_next_to_nothing(cost: Costs, draft: float, noise: float) -> None:
    assert relative(cost, draft, 0.02, 600, noise, range(1)) > 0.965
    # The fault that this must not have: drafting that makes it slower, and goes on.
    assert World(cost, draft).speed(Fixed(8), 600, 0.02) * cost(1) < 0.8


@pytest.mark.parametrize("chance", [0.45, 0.8, 0.95])
@pytest.mark.parametrize("cost", [FLAT, JUMP], ids=["flat", "jump"])
def test_it_comes_near_the_best_fixed_length(cost: Costs, chance: float) -> None:
    for draft in (0.05, 0.3):
        assert relative(cost, draft, chance, 1000, 0.0, range(1, 9)) > 0.92


@pytest.mark.parametrize("draft", [0.05, 0.3])
def test_drafting_is_on_again_soon_after_a_useless_phase_ends(draft: float) -> None:
    waits = []
    for seed in range(12):
        world, control = World(FLAT, draft, seed=seed), Adaptive(8, 16)
        for _ in range(600):
            world.step(control, 0.0)
        off = [k for _, k in world.chosen[-100:]]
        assert off.count(0) > 85
        begun = world.tokens
        while world.chosen[-1][1] < 3:
            world.step(control, 0.9)
        waits.append(world.tokens - begun)
    assert max(waits) < 100


def test_it_stops_soon_when_a_drafter_becomes_useless() -> None:
    for seed in range(10):
        world, control = World(FLAT, 0.1, seed=seed), Adaptive(8, 16)
        world.speed(control, 500, 0.9)
        steps = len(world.chosen)
        while any(k for _, k in world.chosen[-3:]):
            world.step(control, 0.0)
        assert len(world.chosen) - steps < 35


def test_a_long_prompt_is_not_read_by_a_drafter_that_does_not_pay() -> None:
    world, control = World(FLAT, 0.3), Adaptive(8, 16)
    world.catch_up = 0.02
    lost = 0.0
    for answer in range(12):
        world.behind = 500
        begun, tokens = world.seconds, world.tokens
        for i in range(60):
            world.step(control, 0.02, first=i == 0)
        if answer:  # the first is how it is found out
            lost += world.seconds - begun - FLAT(1) * (world.tokens - tokens)
    assert lost < 0.03 * 11 * 60 * FLAT(1)


def test_look_ups_are_used_where_they_come_true_and_the_drafter_elsewhere() -> None:
    world, control = World(FLAT, 0.2), Adaptive(8, 16)
    world.lookup = 0.95
    for i in range(400):
        world.matched = 12 if i % 4 == 0 else 0
        world.step(control, 0.7)
    late = list(zip(range(100, 400), world.chosen[100:], strict=True))
    matched = [choice for i, choice in late if i % 4 == 0]
    others = [choice for i, choice in late if i % 4]
    assert sum(source == "lookup" and k > 8 for source, k in matched) > 0.85 * len(matched)
    assert sum(source == "drafted" and k > 1 for source, k in others) > 0.85 * len(others)
    world.lookup = 0.0
    world.chosen = []
    for _ in range(200):
        world.step(control, 0.7)
    assert sum(source == "lookup" for source, _ in world.chosen[20:]) < 20


def test_a_plain_pass_that_was_long_ago_is_timed_anew_and_never_taken_to_be_free() -> None:
    world, control = World(FLAT, 0.1), Adaptive(8, 0)
    for i in range(1500):  # answers of two steps: half of the steps have a prompt in them
        world.step(control, 0.99, first=i % 2 == 0)
        assert control.as_dict()["pass_ms"].get("1") in (None, pytest.approx(1020))


def test_what_it_knows_can_be_shown() -> None:
    control = Adaptive(8, 16)
    assert control.as_dict()["drafter"]["k"] == 0
    World(FLAT, 0.1).speed(control, 500, 0.8)
    known = control.as_dict()
    assert known["drafter"]["draft_ms"] == pytest.approx(100)
    assert known["pass_ms"]["1"] == pytest.approx(1020)
    assert known["drafter"]["acceptance_by_position"][0] == pytest.approx(0.8, abs=0.15)


def test_a_fixed_length_looks_up_only_behind_a_long_match() -> None:
    assert Fixed(4).choose(9, 7, 0) == ("drafted", 4)
    assert Fixed(4).choose(3, 8, 0) == ("lookup", 3)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_answers_do_not_depend_on_it(options: dict[str, float]) -> None:
    target = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
    drafter = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)
    plain, model = OmniDraft(target, None), OmniDraft(target, drafter)
    for prompt in ("the flake", "a stone lay"):
        expected = plain.generate(prompt, max_tokens=60, method="plain", **options)
        answer = model.generate(prompt, max_tokens=60, **options)
        assert answer.tokens == expected.tokens
        assert plain.control is None or "drafter" not in plain.control
    assert model.control is not None
    assert model.control["pass_ms"]
