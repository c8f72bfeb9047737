from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from omnidraft.errors import InvalidLogitsError, OptionError
from omnidraft.sampling import Sampler, Sampling, law, uniform


def reference_law(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The law as transformers' own warpers make it."""
    from transformers.generation import logits_process as hf

    scores = row[None]
    warpers = [hf.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(hf.MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=1.5, top_k=7),
        Sampling(temperature=0.9, top_k=200, top_p=0.95, min_p=0.02),
        Sampling(temperature=3.0, top_p=0.999),
        Sampling(temperature=1.0, min_p=0.1),
    ],
)
def test_law_is_that_of_transformers(sampling: Sampling) -> None:
    for seed in range(20):
        row = 3 * torch.randn(3000, generator=torch.Generator().manual_seed(seed))
        p = torch.from_numpy(law(row.numpy(), sampling))
        torch.testing.assert_close(p / p.sum(), reference_law(row, sampling), atol=1e-6, rtol=1e-4)


def test_penalties_are_those_of_transformers() -> None:
    from transformers.generation import logits_process as hf

    row = torch.randn(50, generator=torch.Generator().manual_seed(1))
    prompt = [3, 5, 3, 9]
    sampler = Sampler(Sampling(repetition_penalty=1.7), prompt, 50)
    context = list(prompt)
    for _ in range(6):
        expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([context]), row[None].clone())[0]
        token = sampler.draw(row.numpy())
        assert token == int(expected.argmax())
        context.append(token)
    # Presence counts the answer only: each draw takes the next likeliest token, prompt or not.
    sampler = Sampler(Sampling(presence_penalty=100.0), row.topk(2).indices.tolist(), 50)
    assert [sampler.draw(row.numpy()) for _ in range(5)] == row.topk(5).indices.tolist()


def test_draws_follow_the_law() -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=0)
    row = 2 * torch.randn(40, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(sampling, [], 40)
    draws = torch.tensor([sampler.draw(row.numpy()) for _ in range(20_000)])
    counts = torch.bincount(draws, minlength=40)
    p = reference_law(row, sampling)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    assert (
        stats.chisquare(counts[kept], (p[kept] / p[kept].sum() * len(draws)).double().numpy()).pvalue > 1e-3
    )


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    values = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(values)) == len(values)
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert uniform(0, 0) == pytest.approx(0.3859926107094097)  # seeded answers stay the same across versions


def test_padded_ids_are_never_drawn() -> None:
    row = torch.zeros(10)
    row[8:] = 100.0
    greedy, sampled = Sampler(Sampling(), [], 8), Sampler(Sampling(temperature=1.0, seed=0), [], 8)
    assert greedy.draw(row.numpy()) < 8
    assert max(sampled.draw(row.numpy()) for _ in range(200)) < 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_logits_are_refused(temperature: float, bad: float) -> None:
    row = torch.zeros(10)
    row[4] = bad
    with pytest.raises(InvalidLogitsError, match="float32"):
        Sampler(Sampling(temperature=temperature), [], 10).draw(row.numpy())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e300},
        {"frequency_penalty": 1e300},
        {"presence_penalty": math.inf},
        {"seed": -1},
        {"seed": 1.5},
        {"seed": "0"},
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": 1e-40},
        {"temperature": 1e300},
        {"temperature": None},
        {"top_k": 2.0},
        {"top_k": "5"},
        {"top_p": 2},
        {"top_p": math.nan},
        {"top_p": "0.9"},
        {"min_p": math.nan},
        {"repetition_penalty": math.nan},
        {"presence_penalty": [1]},
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="must be"):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-6, 1e6, np.float32(0.5), 1])
def test_extreme_temperatures_stay_in_the_range_of_float32(temperature: float) -> None:
    row = np.array([30.0, -30.0, np.finfo(np.float32).min, -np.inf, 29.0], np.float32)
    p = law(row, Sampling(temperature=temperature))
    assert np.isfinite(p).all()
    assert p[0] == 1


def test_a_seed_may_be_a_number_of_numpy() -> None:
    def drawn(seed: object) -> list[int]:
        noise = Sampler(Sampling(temperature=1.0, seed=seed), [0], 100).noise  # type: ignore[arg-type]
        return [noise.at(0, np.ones(100)), noise.fresh(np.ones(100))]

    assert drawn(np.int64(3)) == drawn(3)
