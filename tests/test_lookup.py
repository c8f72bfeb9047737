"""Look-ups: what is found, that memory is bounded, and that answers are the target's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft
from omnidraft.errors import OptionError
from omnidraft.lookup import History, Lookup
from omnidraft.types import as_tokens

TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
DRAFTER = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)
PROMPT = "the flake fell; the lake was still. then the flake fell in the lake, and"
LARGE = 1 << 15  # tokens; a few dozen in it do not collide


def looked_up(context: list[int], k: int, history: History | None = None) -> tuple[int, tuple[int, ...]]:
    lookup = Lookup(history)
    matched = lookup.match(as_tokens(context))
    return matched, lookup.propose(context, k)[1].tokens if matched else ()


def test_what_followed_the_longest_match_is_proposed() -> None:
    assert looked_up([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 3) == (2, (8, 1, 2)), "the latest run of two"
    assert looked_up([1, 2, 3, 9, 5, 1, 2, 3, 8, 1, 2, 3], 2) == (3, (8, 1))
    assert looked_up([1, 2, 3, 4, 9, 3, 4, 7, 1, 2, 3, 4], 2) == (4, (9, 3)), (
        "a run of four before one of two"
    )
    assert looked_up([1, 2, 3], 3) == (0, ())
    assert looked_up([7, 7, 7], 5) == (2, (7,) * 5), "an end that repeats itself goes on"
    assert looked_up([1, 2, 1, 2, 1, 2], 5) == (4, (1, 2, 1, 2, 1))


def test_a_history_is_worth_half_and_ends_with_each_answer() -> None:
    history = History(LARGE)
    history.add([1, 2, 3, 4, 5, 6])
    history.add([5, 6, 9])
    assert looked_up([8, 1, 2, 3, 4], 5, history) == (2, (5, 6))
    assert looked_up([8, 2, 3], 5, history) == (1, (4, 5, 6))
    assert looked_up([3, 4, 7, 1, 2, 3, 4], 1, history) == (2, (7,)), "the context's own comes first"
    assert looked_up([8, 3, 4, 5, 6], 5, history) == (1, (9,)), "what came after it, not the next answer"


tokens = st.lists(st.integers(0, 2), max_size=50)


@given(tokens, tokens)
@settings(deadline=None)
def test_what_is_found_is_the_latest_of_the_longest_run(text: list[int], context: list[int]) -> None:
    history = History(LARGE, text)

    def brute() -> tuple[int, int]:
        for run in (8, 4, 2):
            ends = [end for end in range(run, len(text)) if text[end - run : end] == context[-run:]]
            if ends:
                return max(ends), common_end(text[: max(ends)], context)
        return 0, 0

    assert history.find(as_tokens(context)) == brute()


def common_end(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b), 32) and a[-length - 1] == b[-length - 1]:
        length += 1
    return length


def test_memory_is_bounded_and_the_latest_stays() -> None:
    history = History(1000)
    for i in range(200):
        history.add(range(i, i + 50))
        assert history.nbytes <= 28 * 1100
    assert looked_up([-7, *range(210, 226)], 3, history) == (8, (226, 227, 228))
    assert looked_up([-7, *range(10, 26)], 3, history) == (0, ())


@pytest.mark.parametrize("k", [None, 1, 5], ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_answers_are_plain_decoding_s(options: dict[str, float], k: int | None) -> None:
    alone, both = OmniDraft(TARGET, None), OmniDraft(TARGET, DRAFTER)
    for max_tokens in (1, 2, 60):
        expected = alone.generate(PROMPT, method="plain", max_tokens=max_tokens, **options).tokens
        for model, method in ((alone, "lookup"), (alone, "auto"), (both, "lookup"), (both, "auto")):
            answer = model.generate(PROMPT, method=method, k=k, max_tokens=max_tokens, **options)
            assert answer.tokens == expected


def test_steps_say_what_was_looked_up_and_it_is_counted() -> None:
    model = OmniDraft(TARGET, None)
    stream = model.stream(PROMPT, method="lookup", k=4, max_tokens=80)
    chunks = list(stream.chunks())
    steps = [chunk.step for chunk in chunks if chunk.step]
    marked = sum(step.provenance(i) == "lookup" for step in steps for i in range(len(step.tokens)))
    assert marked == stream.stats.lookup_tokens == model.stats.lookup_tokens > 5
    assert "lookup" in {source for chunk in chunks for _, source in chunk.pieces}
    assert all(not step.draft.tokens and not step.draft_seconds for step in steps)
    plain = model.generate(PROMPT, method="plain", max_tokens=80)
    assert plain.stats.lookup_tokens == 0
    assert plain.stats.steps > stream.stats.steps


@pytest.mark.parametrize("verification", ["trie", "paper"])
def test_only_compare_verifies_look_ups(verification: str) -> None:
    with pytest.raises(OptionError, match="'lookup' cannot be verified by"):
        OmniDraft(TARGET, None).generate(PROMPT, method="lookup", verification=verification)


def test_nothing_is_remembered_from_answer_to_answer_without_a_profile() -> None:
    model = OmniDraft(TARGET, None)
    first, second = (model.generate("a bird", method="lookup", k=4, max_tokens=40).stats for _ in range(2))
    assert first.steps == second.steps
