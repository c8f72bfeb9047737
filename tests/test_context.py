"""Where a context ends: the drafter's window slides, the target's answer ends, and no position is past a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_models import blurred, save, tiny_config, tiny_module
from toy import ToyModel, ToySession, toy_vocab

import omnidraft
from omnidraft import OmniDraft
from omnidraft.backends.architectures import context_length
from omnidraft.errors import ContextLengthError
from omnidraft.types import Rows

METHODS = [("text", 4), ("text", 64), ("direct", 3), ("ngram", 8), ("prefill", 4), ("prefill", 64)]


class StrictSession(ToySession):
    """Fails where a model with a table of positions would."""

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        assert len(self.tokens) + len(tokens) <= self._model.context_length
        return super().extend(tokens, rows)


class StrictModel(ToyModel):
    def session(self) -> ToySession:
        return StrictSession(self)


def strict(context: int, merges: int, *, order: int, seed: int) -> StrictModel:
    vocab = toy_vocab(merges, order=order)
    vocab.eos = ()  # so that answers are as long as they may be
    model = StrictModel(vocab, seed=seed)
    model.context_length = context
    return model


@pytest.mark.parametrize(("method", "k"), METHODS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}])
def test_a_drafter_s_shorter_window_slides(method: str, k: int, options: dict[str, float]) -> None:
    target, drafter = strict(4096, 60, order=2, seed=1), strict(64, 25, order=1, seed=2)
    options = {"max_tokens": 300} | options
    plain = OmniDraft(target, None).generate("the flake fell", **options)
    stream = OmniDraft(target, drafter).stream("the flake fell", method=method, k=k, **options)
    steps = [chunk.step for chunk in stream.chunks() if chunk.step]
    assert tuple(stream.tokens) == plain.tokens
    assert len(plain.tokens) == 300
    late = steps[len(steps) // 2 :]
    assert sum(step.accepted for step in late) > 10, "it goes on being of use behind the window's end"


def test_a_sliding_window_is_not_fed_anew_for_every_token() -> None:
    drafter = strict(64, 25, order=1, seed=2)
    model = OmniDraft(strict(4096, 60, order=2, seed=1), drafter)
    model.generate("the flake fell", k=40, max_tokens=300)
    passes = model._draft_session.passes  # type: ignore[union-attr]
    assert sum(length > 16 for length in passes) < len(passes) / 8


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_an_answer_ends_with_the_target_s_context(method: str, k: int) -> None:
    target, drafter = strict(50, 60, order=2, seed=1), strict(64, 25, order=1, seed=2)
    model = OmniDraft(target, drafter)
    room = 50 - len(model.prompt_tokens("the flake fell"))
    answer = model.generate("the flake fell", method=method, k=k, max_tokens=300)
    assert answer.finish_reason == "length"
    assert len(answer.tokens) == room
    assert answer.tokens == OmniDraft(target, None).generate("the flake fell", max_tokens=300).tokens


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    target = strict(20, 60, order=2, seed=1)
    model = OmniDraft(target, strict(64, 25, order=1, seed=2))
    prompt = "x" * 19  # a token each
    assert len(model.generate(prompt).tokens) == 1
    with pytest.raises(ContextLengthError, match="20 tokens and toy holds 20"):
        model.generate(prompt + "x")


def test_no_pass_goes_past_a_table_of_positions(tmp_path: Path) -> None:
    target = tiny_module(tiny_config("GPT2", n_positions=64, eos_token_id=None))
    drafter = tiny_module(tiny_config("GPT2", n_positions=64, eos_token_id=None))
    drafter.transformer.wpe = type(drafter.transformer.wpe).from_pretrained(
        drafter.transformer.wpe.weight[:24].clone()
    )
    drafter.config.n_positions = 24
    model = omnidraft.load(
        save(target, tmp_path / "t"),
        save(blurred(drafter), tmp_path / "d"),
        engine="transformers",
        precision="float32",
    )
    assert (model.target.context_length, model.drafter.context_length) == (64, 24)  # type: ignore[union-attr]
    plain = OmniDraft(model.target, None)
    for options in ({"k": 4}, {"k": 4, "temperature": 1.0, "seed": 2}, {"k": 64}):
        options = options | dict(raw=True, max_tokens=300)
        answer = model.generate("the flake fell", **options)
        assert answer.tokens == plain.generate("the flake fell", **options).tokens
        assert answer.finish_reason == "length" or answer.tokens[-1] in model.target.vocab.eos
    with pytest.raises(ContextLengthError, match="holds 64"):
        model.generate("x" * 64, raw=True)


def test_rotary_embeddings_that_turn_old_keys_anew_end_the_context_before() -> None:
    long = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    phi = tiny_config("Phi3", rope_parameters=long, original_max_position_embeddings=64)
    assert context_length(phi) == 64
    dynamic = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
    assert context_length(tiny_config("Llama", rope_parameters=dynamic)) == 32
    assert context_length(tiny_config("Llama")) == 4096
    assert context_length(tiny_config("Gemma3Text")) == 4096
    assert context_length(tiny_config("Mpt")) == 128
    assert context_length(tiny_config("Bloom")) == 2**31
