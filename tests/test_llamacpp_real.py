"""The real pairs on llama.cpp, and mixed with torch: Qwen2.5-Coder, SmolLM2 and Gemma 3 as published."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from test_models import compare_with_plain, fifty_prompts
from ties import rows_over_passes

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; `make test-full` installs it")

from omnidraft import OmniDraft, load, load_model
from omnidraft.demo import PROMPTS
from omnidraft.sampling import Sampling
from omnidraft.session import Model, feed

pytestmark = pytest.mark.models
GREEDY = Sampling(seed=0)
METHODS = [("text", 4), ("direct", 4), ("text", 8), ("direct", 2)]


@pytest.fixture(scope="module")
def small() -> Model:
    return load_model("smollm2-135m", engine="llamacpp")


@pytest.fixture(scope="module")
def coder() -> Model:
    return load_model("qwen2.5-coder-0.5b", engine="llamacpp")


@pytest.fixture(scope="module")
def coder_1_5b() -> Model:
    return load_model("qwen2.5-coder-1.5b", engine="llamacpp")


@pytest.fixture(scope="module")
def windowed() -> Model:
    """Gemma 3 looks back through a sliding window."""
    return load_model("gemma3-270m", engine="llamacpp")


def test_answers_equal_plain_decoding(coder: Model, small: Model) -> None:
    counts = compare_with_plain(coder, small, PROMPTS[0:4:3], GREEDY, METHODS, 24)
    assert sum(counts.values()) == 2


def test_auto_takes_the_file_as_it_is() -> None:
    pair = load("smollm2-135m", None)
    assert (pair.target.engine.name, pair.target.engine.precision) == ("llamacpp", "Q4_1")


@pytest.mark.full
def test_pairs_of_two_engines(coder: Model, small: Model, qwen: Model, drafter: Model) -> None:
    for target, drafting in ((coder, drafter), (qwen, small)):
        counts = compare_with_plain(target, drafting, PROMPTS[:3], GREEDY, METHODS, 24)
        assert sum(counts.values()) == 3


@pytest.mark.full
@pytest.mark.parametrize("target", ["coder", "windowed"])
def test_fifty_prompts(
    request: pytest.FixtureRequest, record_property, small: Model, data: Path, target: str
) -> None:
    model = request.getfixturevalue(target)
    counts = compare_with_plain(model, small, fifty_prompts(data), GREEDY, METHODS, 64)
    record_property("counts", json.dumps(counts))
    print(f"\n{target}: {counts}")
    assert sum(counts.values()) == 50


@pytest.mark.full
@pytest.mark.parametrize("name", ["small", "coder", "windowed"])
def test_feed_equals_a_fresh_prefill(request: pytest.FixtureRequest, name: str) -> None:
    """1,000 random extends and truncations; now and then the last row against those of fresh passes."""
    model, draw = request.getfixturevalue(name), random.Random(0)
    session = model.session()
    tokens: list[int] = []
    for i in range(1000):
        del tokens[draw.randrange(len(tokens) + 1) if draw.random() < 0.5 else len(tokens) :]
        tokens = tokens[-40:]
        tokens += [draw.randrange(40_000) for _ in range(draw.randrange(1, 6))]
        row = feed(session, tokens, draw.randrange(1, min(len(tokens), 9) + 1))[-1]
        assert session.tokens.tolist() == tokens
        if i % 50 == 49 and len(tokens) > 8:
            fresh = rows_over_passes(model, tokens)
            spread = float(np.ptp(fresh, axis=0).max())
            apart = float(np.abs(fresh - row).max(axis=1).min())
            print(f"{name}, operation {i}: {apart:.4f} from the nearest, spread {spread:.4f}")
            assert apart <= spread


@pytest.mark.full
def test_a_sliding_window_can_be_rewound(windowed: Model) -> None:
    """Cut far behind the window of 512 tokens, and go on elsewhere."""
    draw = random.Random(1)
    tokens = [draw.randrange(1000, 40_000) for _ in range(1300)]
    session = windowed.session()
    feed(session, tokens, 1)
    other = [*tokens[:400], *tokens[700:720]]
    rows = feed(session, other, 4)
    np.testing.assert_allclose(rows, feed(windowed.session(), other, 4), atol=0.5)
    assert rows.argmax(axis=1).tolist() == feed(windowed.session(), other, 4).argmax(axis=1).tolist()


@pytest.mark.full
def test_a_long_prompt(coder: Model) -> None:
    text = " ".join(f"The {i}th stone lay by the water." for i in range(1, 400))
    answer = OmniDraft(coder, None).generate(text, raw=True, max_tokens=4)
    assert len(coder.encode(text)) > 3900
    assert len(answer.tokens) == 4
