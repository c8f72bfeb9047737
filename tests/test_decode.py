from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats
from toy import CORPUS, ToyModel, toy_vocab

from omnidraft import OmniDraft, Options
from omnidraft.decode import stream_text
from omnidraft.errors import ContextLengthError, InvalidLogitsError, OptionError
from omnidraft.sampling import Sampling, law
from omnidraft.types import Draft, Proposal, Row, Step
from omnidraft.verify import Compare
from omnidraft.vocab import Vocab

TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
DRAFTER = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)
NO_ROWS = np.empty((0, 0))
PROMPTS = ["the flake", "then the lake was", "x", "日本 🙂 the"]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}])
@pytest.mark.parametrize("method", ["direct", "ngram", "prefill", "text"])
def test_answers_equal_plain_decoding_token_for_token(method: str, options: dict[str, float]) -> None:
    options = {"seed": 3, "max_tokens": 60, "repetition_penalty": 1.1} | options
    for prompt in PROMPTS:
        plain = OmniDraft(TARGET, None).generate(prompt, method="plain", **options)
        model = OmniDraft(TARGET, DRAFTER)
        for k in (1, 2, 4, 8, 40):
            answer = model.generate(prompt, method=method, verification="compare", k=k, **options)
            assert answer.tokens == plain.tokens
            assert answer.text == plain.text
            assert answer.finish_reason == plain.finish_reason
    assert model.stats.steps < model.stats.tokens, "nothing was ever accepted"


@pytest.mark.parametrize(
    ("method", "verification"),
    [("text", "compare"), *itertools.product(["direct", "ngram", "prefill"], ["compare", "trie"])],
)
def test_two_tokens_follow_the_target_s_joint_law(method: str, verification: str) -> None:
    prompt = "the fl"
    context = TARGET.encode(prompt)
    sampling = Sampling(temperature=1.3)
    size = TARGET.vocab.size
    expected: dict[tuple[int, ...], float] = {}
    first = law(TARGET.row(context)[:size], sampling)
    first /= first.sum()
    for a in range(size):
        if a in TARGET.vocab.eos:
            expected[(a,)] = float(first[a])
            continue
        second = law(TARGET.row([*context, a])[:size], sampling)
        for b, p in enumerate((first[a] * second / second.sum()).tolist()):
            expected[a, b] = p
    model, draws = OmniDraft(TARGET, DRAFTER), 6000
    counts = Counter(
        model.generate(
            prompt, method=method, verification=verification, k=3, max_tokens=2, temperature=1.3, seed=seed
        ).tokens
        for seed in range(draws)
    )
    common = [outcome for outcome, p in expected.items() if p * draws >= 10]
    observed = [counts[outcome] for outcome in common]
    wanted = [expected[outcome] * draws for outcome in common]
    observed.append(draws - sum(observed))
    wanted.append(draws - sum(wanted))
    assert len(common) > 5
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_a_rule_that_trusts_the_draft_fails_the_same_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Compare.__call__

    def credulous(self, rows, draft, proposal, sampler, ends):  # type: ignore[no-untyped-def]
        verdict = honest(self, rows, draft, proposal, sampler, ends)
        if not proposal.tokens:
            return verdict
        return type(verdict)((*proposal.tokens[:1], *verdict.tokens[1:]), verdict.accepted)

    plain = [OmniDraft(TARGET, None).generate(p, max_tokens=40) for p in PROMPTS]
    monkeypatch.setattr(Compare, "__call__", credulous)
    drafted = [OmniDraft(TARGET, DRAFTER).generate(p, k=4, max_tokens=40) for p in PROMPTS]
    assert [a.tokens for a in plain] != [a.tokens for a in drafted]


def test_streaming_emits_exactly_what_generate_returns() -> None:
    model = OmniDraft(TARGET, DRAFTER)
    for prompt, temperature in itertools.product(PROMPTS, (0.0, 2.0)):
        options = dict(temperature=temperature, seed=1, max_tokens=50, stop=["lake"])
        pieces = list(model.stream(prompt, **options))
        answer = model.generate(prompt, **options)
        assert "".join(pieces) == answer.text
        assert all(pieces)


def steps_of(vocab, *groups: bytes) -> list[Step]:  # type: ignore[no-untyped-def]
    """Steps whose tokens are single bytes."""
    return [
        Step(
            Draft(()), Proposal(()), tuple(vocab.id_of[bytes([b])] for b in group), 0, NO_ROWS, 0.0, 0.0, 0.0
        )
        for group in groups
    ]


def test_no_half_character_is_emitted() -> None:
    data = "né 🙂!".encode()
    chunks = list(stream_text(iter(steps_of(TARGET.vocab, *(bytes([b]) for b in data))), TARGET.vocab, ()))
    assert [chunk.text for chunk in chunks] == ["n", "", "é", " ", "", "", "", "🙂", "!"]
    cut = stream_text(iter(steps_of(TARGET.vocab, data[:-2])), TARGET.vocab, ())
    assert "".join(chunk.text for chunk in cut) == "né "  # the incomplete end is left out, not replaced


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_stop_strings_straddle_tokens_and_steps(size: int) -> None:
    data = b"one STO two STOP three"
    groups = [data[i : i + size] for i in range(0, len(data), size)]
    chunks = list(stream_text(iter(steps_of(TARGET.vocab, *groups)), TARGET.vocab, ("STOP", "zzz")))
    assert "".join(chunk.text for chunk in chunks) == "one STO two "
    shown = sum(len(chunk.step.tokens) for chunk in chunks if chunk.step)
    assert shown == len(b"one STO two STOP")  # statistics do not count what was not shown
    held = list(stream_text(iter(steps_of(TARGET.vocab, b"ends with ST")), TARGET.vocab, ("STOP",)))
    assert "".join(chunk.text for chunk in held) == "ends with ST"


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    model = OmniDraft(TARGET, DRAFTER)
    whole = model.generate("the flake", max_tokens=6)
    last = TARGET.vocab.decode(whole.tokens[-1:]).decode()
    assert whole.finish_reason == "length"
    assert model.generate("the flake", max_tokens=6, stop=whole.text[-len(last) :]).finish_reason == "stop"


def test_max_tokens_eos_and_context_bound_the_answer() -> None:
    model = OmniDraft(TARGET, DRAFTER)
    for limit in (1, 2, 3, 7):
        answer = model.generate("the flake", max_tokens=limit, k=8)
        assert len(answer.tokens) == answer.stats.tokens == limit
        assert answer.finish_reason == "length"
    ended = model.generate("x", temperature=3.0, seed=0, max_tokens=3000, k=3)
    assert ended.finish_reason == "stop"
    assert ended.tokens[-1] in TARGET.vocab.eos
    assert not set(ended.tokens[:-1]) & set(TARGET.vocab.eos)
    short = ToyModel(TARGET.vocab, seed=1)
    short.context_length = len(short.encode(CORPUS)) + 5
    assert len(OmniDraft(short, DRAFTER).generate(CORPUS).tokens) <= 5
    short.context_length -= 5
    with pytest.raises(ContextLengthError, match="shorten"):
        OmniDraft(short, DRAFTER).generate(CORPUS)


def test_a_drafter_with_a_short_context_slides_and_changes_nothing() -> None:
    small = ToyModel(DRAFTER.vocab, seed=2)
    small.context_length = 24
    plain = OmniDraft(TARGET, None).generate("the flake", max_tokens=120, repetition_penalty=1.2)
    answer = OmniDraft(TARGET, small).generate("the flake", k=4, max_tokens=120, repetition_penalty=1.2)
    assert answer.tokens == plain.tokens
    assert answer.stats.steps < len(answer.tokens)


def test_an_abandoned_stream_leaves_the_next_answer_right() -> None:
    model = OmniDraft(TARGET, DRAFTER)
    expected = OmniDraft(TARGET, None).generate("then the lake", max_tokens=30).tokens
    stream = model.stream("the flake", max_tokens=100)
    next(stream)
    other = model.stream("the flake fell", max_tokens=100)
    next(other)
    del stream
    assert model.generate("then the lake", max_tokens=30).tokens == expected
    next(other)
    assert model.generate("then the lake", max_tokens=30).tokens == expected


def test_one_drafter_serves_several_targets_and_is_not_altered() -> None:
    other = ToyModel(toy_vocab(40, order=9), seed=7)
    pairs = [OmniDraft(TARGET, DRAFTER), OmniDraft(other, DRAFTER)]
    plains = [OmniDraft(TARGET, None), OmniDraft(other, None)]
    streams = [pair.stream("the flake", k=4, max_tokens=40) for pair in pairs]
    texts = ["", ""]
    for parts in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + part for text, part in zip(texts, parts, strict=True)]
    assert texts == [plain.generate("the flake", max_tokens=40).text for plain in plains]


def test_a_chat_feeds_only_what_is_new() -> None:
    model = OmniDraft(TARGET, DRAFTER)
    messages = [{"role": "user", "content": CORPUS}]
    answer = model.generate(messages, max_tokens=20)
    session = model._target_session
    session.passes.clear()  # type: ignore[attr-defined]
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "and then"}]
    model.generate(messages, max_tokens=5)
    assert session.passes[0] < 40  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["direct", "text"])
def test_the_work_of_a_step_does_not_grow_with_the_context(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode_bytes = Vocab.encode_bytes

    def recorded(self: Vocab, data: bytes) -> list[int]:
        encoded.append(len(data))
        return encode_bytes(self, data)

    def longest(words: int) -> int:
        """Most bytes encoded in a step after the first, behind a prompt of so many words."""
        stream = OmniDraft(TARGET, DRAFTER).stream("the lake " * words, method=method, k=4, max_tokens=60)
        chunks = stream.chunks()
        next(chunks)
        encoded.clear()
        list(chunks)
        return max(encoded)

    monkeypatch.setattr(Vocab, "encode_bytes", recorded)
    assert longest(800) <= 2 * longest(50)


def test_statistics_add_up() -> None:
    answer = OmniDraft(TARGET, DRAFTER).generate("the flake", max_tokens=40, k=4)
    stream = OmniDraft(TARGET, DRAFTER).stream("the flake", max_tokens=40, k=4)
    steps = [chunk.step for chunk in stream.chunks() if chunk.step]
    rates = [step.accepted / len(step.proposal.tokens) for step in steps if step.proposal.tokens]
    stats_ = answer.stats
    assert stats_.tokens == sum(len(step.tokens) for step in steps) == len(answer.tokens)
    assert stats_.acceptance_rate == pytest.approx(sum(rates) / len(rates))
    assert stats_.tokens_per_step == stats_.tokens / stats_.steps
    assert stats_.seconds >= stats_.draft_seconds + stats_.verify_seconds
    assert {step.provenance(i) for step in steps for i in range(len(step.tokens))} >= {
        "drafted",
        "correction",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "tetx"}, "unknown method"),
        ({"k": 0}, "k is 0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temprature": 1}, "unknown option temprature"),
        ({"stop": [""]}, "stop string"),
        ({"top_p": 2}, "top_p"),
        ({"k": "4"}, "k is '4'; it must be an integer"),
        ({"k": True}, "k is True"),
        ({"k": 4.0}, "k is 4.0"),
        ({"max_tokens": "10"}, "max_tokens is '10'"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"temperature": "0"}, "temperature is '0'"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": [5]}, "stop string"),
        ({"processors": [lambda tokens, row: None]}, "gave a NoneType that is no row of"),
        ({"processors": [lambda tokens, row: row[:5]]}, "gave a ndarray that is no row of"),
        ({"processors": 5}, "processors is 5"),
        ({"processors": [5]}, "logits processor is a int"),
        ({"method": 3}, "unknown method 3"),
        ({"method": ["text"]}, "unknown method"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": 5}, "not JSON"),
        ({"json_schema": {"type": "nonsense"}}, "schema is refused"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        OmniDraft(TARGET, DRAFTER).generate("x", **options)


def test_bad_prompts_are_named() -> None:
    model = OmniDraft(TARGET, DRAFTER)
    for prompt, message in [
        ("", "empty"),
        ([], "empty"),
        ("\ud800", "surrogates"),
        ([{"role": "user"}], "lacks"),
        ([{"role": "user", "content": "a\udc80"}], "surrogates"),
        ([{"role": "user", "content": None}], "a prompt's text is a NoneType"),
        ([{"role": 1, "content": "a"}], "a prompt's text is a int"),
        (5, "neither text nor chat messages"),
        (None, "neither text nor chat messages"),
        (b"bytes", "neither text nor chat messages"),
        (["text"], "neither text nor chat messages"),
    ]:
        with pytest.raises(OptionError, match=message):
            model.generate(prompt)
    for tokens, message in [
        ([], "no tokens of target"),
        ([-1], "no tokens"),
        ([TARGET.vocab.size], "no tokens"),
    ]:
        with pytest.raises(OptionError, match=message):
            model.answer(tokens, Options())
    with pytest.raises(OptionError, match="stop is 'ab'"):  # it would be two stop strings
        Options(stop="ab")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="needs a drafter"):
        OmniDraft(TARGET, None).generate("x", method="text")


def test_invalid_logits_end_with_an_error_that_names_the_cure() -> None:
    class Broken(ToyModel):
        def row(self, context):  # type: ignore[no-untyped-def]
            return super().row(context) * np.float32(np.nan)

    broken = Broken(TARGET.vocab, name="broken")
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"method": "prefill", "temperature": 1.0}):
        with pytest.raises(
            InvalidLogitsError, match=r"^broken gave NaN .* after 3 tokens; load it in float32"
        ):
            OmniDraft(broken, DRAFTER).generate("xyz", **options)


def test_an_answer_ends_where_the_logits_become_invalid() -> None:
    class BreaksAt7(ToyModel):
        def row(self, context):  # type: ignore[no-untyped-def]
            return super().row(context) * np.float32(np.nan if len(context) >= 7 else 1)

    stream = OmniDraft(BreaksAt7(TARGET.vocab, name="breaks"), DRAFTER).stream("xyz", max_tokens=20)
    with pytest.raises(InvalidLogitsError, match="breaks gave NaN or infinite logits after 7 tokens"):
        list(stream)
    assert len(stream.tokens) <= 4


def test_a_broken_drafter_is_named_where_its_law_counts_and_harmless_where_not() -> None:
    class Broken(ToyModel):
        def row(self, context):  # type: ignore[no-untyped-def]
            return super().row(context) * np.float32(np.nan)

    model = OmniDraft(TARGET, Broken(DRAFTER.vocab, name="broken"))
    with pytest.raises(InvalidLogitsError, match="broken gave NaN"):
        model.generate("xyz", method="prefill", temperature=1.0, max_tokens=9)
    plain = OmniDraft(TARGET, None).generate("xyz", max_tokens=9)
    assert model.generate("xyz", max_tokens=9).tokens == plain.tokens


def test_processors_that_leave_nothing_to_draw_are_blamed_and_not_the_model() -> None:
    def nothing(tokens, row):  # type: ignore[no-untyped-def]
        return np.full_like(row, -np.inf)

    for temperature in (0.0, 1.0):
        with pytest.raises(OptionError, match="after 3 tokens the logits processors"):
            OmniDraft(TARGET, None).generate("xyz", processors=[nothing], temperature=temperature)


RULES = [
    ("text", "compare"),
    *itertools.product(["direct", "ngram", "prefill"], ["compare", "trie", "paper"]),
]


@pytest.mark.parametrize(("method", "verification"), RULES)
def test_grammars_hold_across_vocabularies(method: str, verification: str) -> None:
    schema = {
        "type": "object",
        "properties": {"lake": {"type": "string", "maxLength": 9}},
        "required": ["lake"],
    }
    options = {"json_schema": schema | {"additionalProperties": False}, "max_tokens": 60}
    plain = OmniDraft(TARGET, None).generate("the flake", **options)
    model = OmniDraft(TARGET, DRAFTER)
    answer = model.generate("the flake", method=method, verification=verification, **options)
    assert answer.tokens == plain.tokens
    for seed in range(5):
        answer = model.generate(
            "the flake",
            method=method,
            verification=verification,
            temperature=1.2,
            seed=seed,
            k=4,  # a measured length would make the draws, and so the answer's length, depend on the clock
            **options,
        )
        assert answer.finish_reason == "stop"
        assert json.loads(answer.text).keys() == {"lake"}


@pytest.mark.parametrize(("method", "verification"), RULES)
def test_processors_see_accepted_tokens_only_and_once(method: str, verification: str) -> None:
    seen: list[list[int]] = []

    def watch(tokens: Sequence[int], row: Row) -> Row:
        seen.append(list(tokens))
        changed = row.copy()
        changed[TARGET.vocab.id_of[b"e"]] = -np.inf
        return changed

    model = OmniDraft(TARGET, DRAFTER)
    options = {"method": method, "verification": verification, "temperature": 1.0, "seed": 4}
    answer = model.generate("the flake", processors=[watch], max_tokens=30, **options)
    prompt = model.prompt_tokens("the flake")
    assert TARGET.vocab.id_of[b"e"] not in answer.tokens
    assert all(tokens == [*prompt, *answer.tokens[: len(tokens) - len(prompt)]] for tokens in seen)
    lengths = [len(tokens) for tokens in seen]
    assert lengths == sorted(set(lengths))  # each position once, in order


def test_a_bad_schema_is_refused_before_anything_is_decoded() -> None:
    with pytest.raises(OptionError, match="schema"):
        OmniDraft(TARGET, DRAFTER).stream("x", json_schema={"type": "strin"})
    with pytest.raises(OptionError, match="processor"):
        OmniDraft(TARGET, DRAFTER).stream("x", processors=[3])
