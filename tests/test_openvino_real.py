"""The OpenVINO engine on real models: answers, rewinding, and how much the precision changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_models import SAMPLINGS, compare_with_plain, fifty_prompts
from tiny_models import random_walk

from omnidraft import OmniDraft, load_model
from omnidraft.demo import PROMPTS
from omnidraft.session import Model, feed

pytest.importorskip("openvino")
pytestmark = pytest.mark.models

METHODS = [("text", 4), ("direct", 4), ("text", 8), ("direct", 2)]


def on_openvino(name: str, precision: str = "int8") -> Model:
    return load_model(name, engine="openvino", precision=precision)


@pytest.fixture(scope="module")
def ov_drafter() -> Model:
    return on_openvino("smollm2-135m")


def test_answers_equal_plain_decoding(ov_drafter: Model) -> None:
    target = on_openvino("qwen2.5-coder-0.5b")
    counts = compare_with_plain(target, ov_drafter, PROMPTS[0:10:5], SAMPLINGS["greedy"], METHODS, 16)
    assert counts["same"] > 0


def test_rows_are_near_those_of_transformers(ov_drafter: Model, drafter: Model) -> None:
    """Eight bits for weights, and for activations where the CPU has VNNI, move the logits, but by little."""
    tokens = drafter.chat([{"role": "user", "content": PROMPTS[4]}])
    rows = feed(ov_drafter.session(), tokens, len(tokens))
    expected = feed(drafter.session(), tokens, len(tokens))
    assert np.abs(rows - expected).mean() < 0.08 * expected.std()


@pytest.mark.full
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"])
def test_feed_equals_a_fresh_prefill(name: str) -> None:
    random_walk(on_openvino(name).session, operations=1000, vocab=40_000, longest=40)


def plain_answers(target: Model, prompts: list[str]) -> list[list[int]]:
    model = OmniDraft(target, None)
    return [list(model.generate(prompt, temperature=0.0, max_tokens=64).tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def exact_answers(data: Path) -> list[list[int]]:
    """Plain decoding's with weights in float32."""
    return plain_answers(on_openvino("qwen2.5-coder-0.5b", "float32"), fifty_prompts(data))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_fifty_prompts(
    precision: str, exact_answers: list[list[int]], data: Path, record_property: Callable[[str, str], None]
) -> None:
    prompts, nano = fifty_prompts(data), on_openvino("omnidraft-nano")
    target = on_openvino("qwen2.5-coder-0.5b", precision)
    counts = compare_with_plain(target, nano, prompts, SAMPLINGS["greedy"], METHODS, 64)
    changed = sum(map(list.__ne__, exact_answers, plain_answers(target, prompts)))
    record_property("counts", json.dumps(counts | {"changed from float32": changed}))
    print(f"\n{precision}: {counts}, {changed} of {len(prompts)} differ from float32's")
    assert sum(counts.values()) == 50
