"""What threads may share: models, between OmniDrafts of their own; and one OmniDraft, whose requests take turns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_models import blurred, save, tiny_config, tiny_module
from toy import ToyModel, toy_vocab

import omnidraft
from omnidraft import OmniDraft
from omnidraft.vocab import Alignment

PROMPTS = ["the flake", "then the lake was", "a stone lay by", "x"]
OPTIONS: dict[str, Any] = dict(k=4, max_tokens=40, temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def toys() -> tuple[ToyModel, ToyModel]:
    return ToyModel(toy_vocab(60, order=2, padding=5), seed=1), ToyModel(toy_vocab(25, order=1), seed=2)


def at_once(work: Callable[[str], Any], prompts: list[str]) -> list[Any]:
    """`work` of each prompt, all starting together, one thread each."""
    start = threading.Barrier(len(prompts))

    def run(prompt: str) -> Any:
        start.wait(60)
        return work(prompt)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(run, prompts, timeout=120))


@pytest.mark.parametrize("method", ["text", "ngram", "prefill"])
def test_threads_with_their_own_omnidraft_share_models(method: str) -> None:
    target, _ = toys()
    expected = [OmniDraft(target, None).generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
    target, drafter = toys()  # nothing in their lazy caches

    def answer(prompt: str) -> tuple[int, ...]:
        return OmniDraft(target, drafter).generate(prompt, method=method, **OPTIONS).tokens

    assert at_once(answer, PROMPTS) == expected


@pytest.mark.parametrize("method", ["text", "ngram", "prefill"])
def test_requests_to_one_omnidraft_take_turns(method: str) -> None:
    target, _ = toys()
    expected = [OmniDraft(target, None).generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
    model = OmniDraft(*toys())
    for _ in range(3):
        answers = at_once(lambda prompt: model.generate(prompt, method=method, **OPTIONS), PROMPTS)
        assert [answer.tokens for answer in answers] == expected
    assert model.stats.tokens == 3 * sum(map(len, expected))
    # Without a seed they are answered too, under the rule that learns from and walks the shared trie.
    at_once(lambda prompt: model.generate(prompt, method="ngram", temperature=1.0, max_tokens=40), PROMPTS)


def test_an_abandoned_stream_keeps_nobody_waiting() -> None:
    model = OmniDraft(*toys())
    stream = model.stream(PROMPTS[0], **OPTIONS)
    next(stream)
    answers = at_once(lambda prompt: model.generate(prompt, **OPTIONS).tokens, PROMPTS)
    rest = "".join(stream)  # and it may be taken up again
    assert rest == OmniDraft(*toys()).generate(PROMPTS[0], **OPTIONS).text[-len(rest) :]
    assert answers == [OmniDraft(*toys()).generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]


def test_an_error_in_a_step_keeps_nobody_waiting() -> None:
    class Broken(ToyModel):
        def row(self, context):  # type: ignore[no-untyped-def]
            if self.vocab.decode(context).startswith(b"x"):
                raise RuntimeError("broken")
            return super().row(context)

    model = OmniDraft(Broken(toy_vocab(60, order=2), seed=1), toys()[1])

    def answer(prompt: str) -> bool:
        try:
            return bool(model.generate(prompt, **OPTIONS).tokens)
        except RuntimeError:
            return False

    assert at_once(answer, PROMPTS) == [True, True, True, False]


def test_tables_filled_on_first_use_are_right_whoever_comes_first() -> None:
    def look(vocab: Any) -> tuple[Any, ...]:
        return vocab.fingerprint, vocab.id_of, vocab.special_text, vocab.encode_bytes(b"the \xe4 flake")

    expected = look(toy_vocab(60))
    vocab, other = toy_vocab(60), toy_vocab(25, order=1)
    assert at_once(lambda _: look(vocab), PROMPTS) == [expected] * len(PROMPTS)
    aligned = at_once(lambda _: Alignment(other, vocab).draft_to_target, PROMPTS)
    assert aligned == [Alignment(toy_vocab(25, order=1), toy_vocab(60)).draft_to_target] * len(PROMPTS)


def test_threads_share_transformers_models(tmp_path: Path) -> None:
    module = tiny_module(tiny_config("Gemma3Text"))
    target = omnidraft.load_model(
        save(module, tmp_path / "target"), engine="transformers", precision="float32"
    )
    drafter = omnidraft.load_model(
        save(blurred(module), tmp_path / "drafter", order=1), engine="transformers", precision="float32"
    )
    assert len({id(vocab) for vocab in at_once(lambda _: target.vocab, PROMPTS)}) == 1
    expected = [OmniDraft(target, None).generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
    answers = at_once(lambda prompt: OmniDraft(target, drafter).generate(prompt, **OPTIONS).tokens, PROMPTS)
    assert answers == expected
    shared = OmniDraft(target, drafter)
    assert at_once(lambda prompt: shared.generate(prompt, **OPTIONS).tokens, PROMPTS) == expected
