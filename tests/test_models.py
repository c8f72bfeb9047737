"""The real pairs: SmolLM2 drafts for Qwen2.5-Coder 0.5B (in CI, few prompts) and Gemma 3 (under `--full`)."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest
from ties import assert_equal_but_for_ties

from omnidraft import OmniDraft, load_model
from omnidraft.demo import PROMPTS
from omnidraft.sampling import Sampling
from omnidraft.session import feed
from omnidraft.tasks import load_task
from omnidraft.vocab import Alignment

pytestmark = pytest.mark.models

SAMPLINGS = {
    "greedy": Sampling(seed=0),
    "t0.7": Sampling(temperature=0.7, top_p=0.9, seed=1),
    "t1": Sampling(temperature=1.0, top_p=0.9, seed=2),
}


def compare_with_plain(
    target, drafter, prompts, sampling: Sampling, methods_and_k, max_tokens: int
) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """Every answer against plain decoding's; returns how many were the same and how many parted at a tie."""
    plain_model, model = OmniDraft(target, None), OmniDraft(target, drafter)
    counts = {"same": 0, "ties": 0}
    options = dict(
        temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed, max_tokens=max_tokens
    )
    for i, prompt in enumerate(prompts):
        plain = plain_model.generate(prompt, **options)
        method, k = methods_and_k[i % len(methods_and_k)]
        answer = model.generate(prompt, method=method, k=k, **options)
        tokens = model.prompt_tokens(prompt)
        same = assert_equal_but_for_ties(target, tokens, plain.tokens, answer.tokens, sampling)
        counts["same" if same else "ties"] += 1
    assert model.stats.steps < model.stats.tokens, "nothing was ever accepted"
    return counts


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_equal_plain_decoding(qwen, drafter, sampling: str) -> None:  # type: ignore[no-untyped-def]
    prompts = PROMPTS[0:10:3]
    counts = compare_with_plain(qwen, drafter, prompts, SAMPLINGS[sampling], [("text", 4), ("direct", 3)], 24)
    assert counts["same"] > 0


def test_our_own_drafter(qwen) -> None:  # type: ignore[no-untyped-def]
    nano = load_model("omnidraft-nano", engine="transformers", precision="float32")
    compare_with_plain(qwen, nano, PROMPTS[:2], SAMPLINGS["greedy"], [("text", 4)], 24)


def test_json_across_vocabularies(qwen, drafter) -> None:  # type: ignore[no-untyped-def]
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    model = OmniDraft(qwen, drafter)
    for options in ({"method": "text"}, {"method": "prefill", "temperature": 1.0, "seed": 1}):
        answer = model.generate("A person, as JSON.", json_schema=schema, max_tokens=40, k=4, **options)
        assert json.loads(answer.text).keys() == {"name", "age"}
    assert model.stats.steps < model.stats.tokens


def fifty_prompts(data: Path) -> list[str]:
    tasks = ("gsm8k", "mbpp", "humaneval", "alpaca", "spec_bench")
    return [prompt for task in tasks for prompt in load_task(task, data, 10)]


@pytest.mark.full
@pytest.mark.parametrize("target", ["qwen", "gemma"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_fifty_prompts(request, record_property, drafter, data, target: str, sampling: str) -> None:  # type: ignore[no-untyped-def]
    methods = [("text", 4), ("direct", 4), ("text", 8), ("direct", 2)]
    model = request.getfixturevalue(target)
    counts = compare_with_plain(model, drafter, fifty_prompts(data), SAMPLINGS[sampling], methods, 64)
    record_property("counts", json.dumps(counts))
    print(f"\n{target} {sampling}: {counts}")
    assert sum(counts.values()) == 50


def test_vocabularies_are_read_as_bytes(qwen, drafter) -> None:  # type: ignore[no-untyped-def]
    assert (
        Alignment(drafter.vocab, qwen.vocab).shared == 39_234
    )  # as counted before the first line was written
    for vocab in (qwen.vocab, drafter.vocab):
        for text in [
            "Hello  world\n\n\tx = 1234",
            "naïve café 日本語 العربية 🙂👩‍👩‍👧",
            "e\u0301 <|im_end|>",
        ]:
            tokens = vocab.encode_bytes(text.encode())
            assert vocab.decode(tokens) == text.encode()
            assert not set(tokens) & set(vocab.specials.values())
        assert vocab.decode(vocab.encode_bytes(b"ab\xe4\xb8 c")) == b"ab\xe4\xb8 c"
    assert (qwen.vocab.size, qwen.vocab.width) == (151_665, 151_936)
    assert qwen.vocab.bos is None
    assert drafter.vocab.bos is None


def test_text_that_a_tokenizer_drops_is_left_out(qwen, drafter) -> None:  # type: ignore[no-untyped-def]
    missing = [
        b for b in range(256) if drafter.vocab.decode(drafter.vocab.encode_bytes(bytes([b]))) != bytes([b])
    ]
    assert len(missing) == 21
    for data in (bytes(missing[:3]) + b"abc", b"a\x00b"):
        assert drafter.vocab.decode(drafter.vocab.encode_bytes(data)) == bytes(
            b for b in data if b not in missing
        )
        assert qwen.vocab.decode(qwen.vocab.encode_bytes(data)) == data


def test_specials_match_by_text_and_role(qwen, drafter) -> None:  # type: ignore[no-untyped-def]
    alignment = Alignment(drafter.vocab, qwen.vocab)
    for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert alignment.special_target_to_draft[qwen.vocab.specials[text]] == drafter.vocab.specials[text]


@pytest.mark.full
def test_gemma_is_compared_by_bytes_not_by_display_string(gemma, qwen) -> None:  # type: ignore[no-untyped-def]
    alignment = Alignment(gemma.vocab, qwen.vocab)
    pieces = {gemma.vocab.pieces[id] for id, token in enumerate(alignment.draft_to_target) if token >= 0}
    assert len(pieces) == 95_968
    assert alignment.shared == len(pieces) + 110  # Gemma's byte tokens spell single characters once more
    for text in ["Hello  world\n\n\tx = 1", " leading", "日本語 🙂", "a\u2581b"]:
        assert (
            gemma.vocab.decode(gemma.vocab.encode_bytes(text.encode()))
            == text.replace("\u2581", " ").encode()
        )


def test_a_drafter_is_not_altered_by_use(qwen, drafter) -> None:  # type: ignore[no-untyped-def]
    before = feed(drafter.session(), list(range(100, 140)), 40)
    generation_config = drafter.module.generation_config.to_dict()
    OmniDraft(qwen, drafter).generate("Hi", max_tokens=4)
    assert np.array_equal(before, feed(drafter.session(), list(range(100, 140)), 40))
    assert drafter.module.generation_config.to_dict() == generation_config


@pytest.mark.full
def test_memory_is_flat_over_200_requests(qwen, drafter) -> None:  # type: ignore[no-untyped-def]
    def resident() -> int:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    model = OmniDraft(qwen, drafter)
    sizes = []
    for i in range(200):
        model.generate(PROMPTS[i % len(PROMPTS)], max_tokens=6)
        if i in (39, 199):
            sizes.append(resident())
    assert sizes[1] - sizes[0] < 50e6, sizes
