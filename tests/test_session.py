from __future__ import annotations

import copy
import random
import weakref
from time import perf_counter

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, random_walk, tiny_config, tiny_module
from toy import ToyModel, toy_vocab

from omnidraft.backends.huggingface import HuggingFaceSession, _pack, _PackedLinear
from omnidraft.session import common_prefix, feed, write
from omnidraft.types import as_tokens

NAMES = ["Llama", "Qwen2", "Gemma3Text"]


@pytest.mark.parametrize("name", NAMES)
def test_feed_equals_a_fresh_prefill(name: str) -> None:
    module = tiny_module(tiny_config(name))
    random_walk(lambda: HuggingFaceSession(module), operations=1000, vocab=VOCAB, longest=40)


@pytest.mark.full
@pytest.mark.parametrize("name", ["drafter", "qwen", "gemma"])
def test_feed_equals_a_fresh_prefill_on_real_models(name: str, request: pytest.FixtureRequest) -> None:
    random_walk(request.getfixturevalue(name).session, operations=1000, vocab=40_000, longest=40)


def test_a_long_prompt_is_fed_in_chunks() -> None:
    model = ToyModel(toy_vocab(10))
    session = model.session()
    tokens = [i % 250 for i in range(1300)]
    rows = feed(session, tokens, 9)
    assert session.passes == [512, 512, 276]
    assert np.array_equal(rows, feed(model.session(), tokens, 9))
    session = model.session()
    feed(session, tokens[:515], 9)
    assert session.passes == [506, 9]  # a chunk never eats into the rows that are wanted


def test_feed_refuses_rows_that_are_not_there() -> None:
    session = ToyModel(toy_vocab(10)).session()
    for rows in (0, 4):
        with pytest.raises(ValueError, match="rows"):
            feed(session, [1, 2, 3], rows)
    with pytest.raises(ValueError, match="rows"):
        write(session, [], 4, np.ones(session._model.vocab.width, np.bool_), ends=())


@pytest.mark.parametrize("name", NAMES)
def test_write_takes_the_likeliest_usable_token_each_time(name: str) -> None:
    module, prompt, k = tiny_module(tiny_config(name)), [1, 2, 3], 6
    generator = np.random.default_rng(0)
    for share in (1.0, 0.5, 0.1):
        usable = generator.random(VOCAB) < share
        expected: list[int] = []
        while len(expected) < k:
            row = feed(HuggingFaceSession(module), [*prompt, *expected], 1)[0]
            expected.append(int(np.where(usable, row, -np.inf).argmax()))
        session = HuggingFaceSession(module)
        feed(session, [1, 2, 9, 9], 1)  # to be rewound
        start, before = perf_counter(), session.seconds
        assert write(session, prompt, k, usable, ends=()) == expected
        assert 0 < session.seconds - before < perf_counter() - start  # each pass counted once
        assert session.tokens.tolist() == [*prompt, *expected[:-1]]
        end = expected[2]
        assert write(session, prompt, k, usable, ends={end}) == expected[: expected.index(end) + 1]
        assert write(session, prompt, 1, usable, ends={end}) == expected[:1]


def test_common_prefix() -> None:
    generator = random.Random(1)
    for _ in range(300):
        a = [generator.randrange(2) for _ in range(generator.randrange(9))]
        b = [generator.randrange(2) for _ in range(generator.randrange(9))]
        expected = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        assert common_prefix(as_tokens(a), as_tokens(b)) == expected


def test_a_pass_that_is_interrupted_leaves_the_cache_as_it_was() -> None:
    module = tiny_module(tiny_config("Llama"))
    session = HuggingFaceSession(module)
    feed(session, [1, 2, 3], 1)
    expected = feed(HuggingFaceSession(module), [1, 2, 3, 4, 5], 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = module.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        feed(session, [1, 2, 3, 9, 9], 1)
    hook.remove()
    np.testing.assert_allclose(feed(session, [1, 2, 3, 4, 5], 1), expected, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_multiply_as_torch_does(bias: bool) -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(512, 700, bias=bias), torch.nn.Linear(700, 8))
    packed, mixed = copy.deepcopy(block), copy.deepcopy(block)
    for module, is_mixed in ((packed, False), (mixed, True)):
        _pack(module, mixed=is_mixed)
        assert isinstance(module[0], _PackedLinear)
        assert type(module[1]) is torch.nn.Linear  # too small to gain
    with torch.inference_mode():
        for m in (1, 2, 5, 9, 100):
            x = torch.randn(1, m, 512)
            torch.testing.assert_close(packed[0](x), block[0](x), atol=1e-5, rtol=1e-5)
            rounded = m == 1 and not bias
            torch.testing.assert_close(
                mixed[0](x), block[0](x), atol=2e-2 if rounded else 1e-5, rtol=1e-2 if rounded else 1e-5
            )


def test_a_dropped_session_frees_its_cache() -> None:
    session = HuggingFaceSession(tiny_module(tiny_config("Llama")))
    feed(session, [1, 2, 3], 1)
    keys = weakref.ref(session._cache.layers[0]._buffers[0])
    del session
    assert keys() is None
