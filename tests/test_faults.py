"""Faults of other engines. Each has a check that our code passes, and that fails once the fault is planted in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from exact import Pair, error
from test_decode import steps_of
from toy import CORPUS, ToyModel, ToySession, toy_vocab

from omnidraft import OmniDraft, align, decode, engine, processors, verify, vocab
from omnidraft.errors import OmniDraftError
from omnidraft.ngrams import SymbolLaw, Trie
from omnidraft.sampling import Sampling
from omnidraft.session import feed
from omnidraft.spellings import Lexicon
from omnidraft.translate import DraftContext, SymbolTranslator, TextTranslator
from omnidraft.types import Draft, Row, Step
from omnidraft.verify import Compare, Walk
from omnidraft.vocab import Alignment, Vocab

DRAFT, TARGET = toy_vocab(25, order=1), toy_vocab(60, order=2, padding=5)
Check = Callable[[], None]
Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Check, Plant]] = {}


def fault(name: str, check: Check) -> Callable[[Plant], Plant]:
    def entered(plant: Plant) -> Plant:
        FAULTS[name] = (check, plant)
        return plant

    return entered


def models() -> tuple[ToyModel, ToyModel]:
    """(target, drafter), new ones."""
    return ToyModel(TARGET, name="target", seed=1), ToyModel(DRAFT, name="drafter", seed=2)


# Vocabularies and translation


def the_law_is_the_target_s() -> None:
    pair = Pair("a b ab", "a b bb")

    def direct(pair: Pair):  # type: ignore[no-untyped-def]
        trie = Trie(pair.lexicon)
        return SymbolTranslator(trie, walk=True), Walk(trie)

    sampling = Sampling(temperature=1)
    law = pair.drafted_law(direct, k=2, sampling=sampling, length=2, steps=1)
    assert error(law, pair.own_law(sampling, 2)) < 1e-9


@fault("ids scattered where a vocabulary is not sorted", the_law_is_the_target_s)
def scattered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "SymbolLaw", lambda table, law: SymbolLaw(table, np.roll(law, 1)))


def a_context_has_one_bos() -> None:
    context = DraftContext(Alignment(DRAFT, TARGET))
    for text in (b"the fl", b"ake fell", b" in", b" the lake"):
        context.extend(TARGET.encode_bytes(text))
    assert list(context.tokens).count(DRAFT.bos) == 1
    assert DRAFT.decode(context.tokens) == b"the flake fell in the lake"


@fault("BOS at every re-encoding", a_context_has_one_bos)
def bos_again(patch: pytest.MonkeyPatch) -> None:
    encode = Vocab.encode_bytes
    patch.setattr(Vocab, "encode_bytes", lambda self, data: [self.bos, *encode(self, data)])


def an_end_is_the_drafter_s_own() -> None:
    context = DraftContext(Alignment(DRAFT, TARGET))
    context.extend([*TARGET.encode_bytes(b"the lake"), TARGET.eos[0]])
    assert context.tokens[-1] == DRAFT.eos[0] != TARGET.eos[0]


@fault("the target's EOS id given to the drafter", an_end_is_the_drafter_s_own)
def foreign_eos(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vocab, "_match_specials", lambda source, other: {id: id for id in source.eos})


def incomplete_characters_keep_their_bytes() -> None:
    for data in (b"\xe2\x82", b"lake \xf0\x9f", b"\xff\xfea", "€".encode()[1:]):
        assert TARGET.decode(TARGET.encode_bytes(data)) == data
        context = DraftContext(Alignment(DRAFT, TARGET))
        context.extend(TARGET.encode_bytes(data))
        assert DRAFT.decode(context.tokens) == data


@fault("incomplete UTF-8 encoded as U+FFFD", incomplete_characters_keep_their_bytes)
def replaced_when_encoded(patch: pytest.MonkeyPatch) -> None:
    encode = Vocab.encode_bytes
    patch.setattr(
        Vocab, "encode_bytes", lambda self, data: encode(self, data.decode("utf-8", "replace").encode())
    )


def characters_are_shown_whole() -> None:
    data = "né 🙂€".encode()
    steps = steps_of(TARGET, *(bytes([byte]) for byte in data))
    assert "".join(chunk.text for chunk in decode.stream_text(iter(steps), TARGET, ())) == data.decode()


@fault("incomplete UTF-8 shown as U+FFFD", characters_are_shown_whole)
def replaced_when_shown(patch: pytest.MonkeyPatch) -> None:
    class TokenByToken:
        def __init__(self, errors: str) -> None:
            self.errors = errors

        def decode(self, data: bytes) -> str:
            return data.decode("utf-8", self.errors)

    patch.setattr(decode.codecs, "getincrementaldecoder", lambda name: TokenByToken)


def only_equal_tables_are_the_same() -> None:
    one, other = toy_vocab(30, order=1), toy_vocab(30, order=2)
    assert one.size == other.size
    context = DraftContext(Alignment(one, other))
    context.extend(other.encode_bytes(b"the flake"))
    assert one.decode(context.tokens) == b"the flake"


@fault("two tokenizers of equal size taken for the same", only_equal_tables_are_the_same)
def same_by_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vocab, "fingerprint", property(lambda self: str(self.size)))


def the_drafter_reads_text_it_has_no_tokens_for() -> None:
    data = b"the flake fell on the stone"
    tokens = TARGET.encode_bytes(data)
    assert any(TARGET.pieces[token] not in DRAFT.id_of for token in tokens)
    context = DraftContext(Alignment(DRAFT, TARGET))
    context.extend(tokens)
    assert DRAFT.decode(context.tokens) == data
    assert DRAFT.specials["<sep>"] not in context.tokens


@fault("unmapped context tokens shown to the drafter as UNK", the_drafter_reads_text_it_has_no_tokens_for)
def unknown_tokens(patch: pytest.MonkeyPatch) -> None:
    def extend(self: DraftContext, tokens: Sequence[int]) -> None:
        unknown = DRAFT.specials["<sep>"]
        self.tokens.extend(DRAFT.id_of.get(TARGET.pieces[token], unknown) for token in tokens)

    patch.setattr(DraftContext, "extend", extend)


def what_the_target_cannot_spell_ends_a_proposal() -> None:
    mute = toy_vocab(60, order=2)
    bell = mute.id_of[b"\a"]
    mute.pieces = tuple(b"" if id == bell else piece for id, piece in enumerate(mute.pieces))
    mute.__dict__.pop("id_of")
    draft = Draft(tuple(DRAFT.encode_bytes(b"the\alake")))
    for translator in translators(Alignment(DRAFT, mute)):
        tokens = [token for token in draft.tokens if translator.usable[token]]
        proposed = mute.decode(translator.translate([], Draft(tuple(tokens))).tokens)
        assert DRAFT.decode(tokens).startswith(proposed)


def translators(alignment: Alignment) -> Iterable[SymbolTranslator | TextTranslator]:
    trie = Trie(Lexicon.build(alignment))
    trie.fill()
    return TextTranslator(alignment), SymbolTranslator(trie)


@fault("dropped text shifts what comes after it", what_the_target_cannot_spell_ends_a_proposal)
def shifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TextTranslator, "_propose", lambda self, context, data: self.alignment.target.encode_bytes(data)
    )


# A drafter and its targets


def a_drafter_serves_two_targets_and_is_not_altered() -> None:
    drafter = toy_vocab(25, order=1)
    before = drafter.pieces
    for order in (2, 3):
        target = toy_vocab(60, order=order)
        answer = OmniDraft(ToyModel(target, seed=order), ToyModel(drafter, seed=9)).generate(
            "the flake", max_tokens=20
        )
        assert (
            answer.tokens
            == OmniDraft(ToyModel(target, seed=order), None).generate("the flake", max_tokens=20).tokens
        )
        assert Alignment(drafter, target).shared == Alignment(toy_vocab(25, order=1), target).shared
    assert drafter.pieces == before


@fault(
    "a drafter altered by use, and unfit for a second target", a_drafter_serves_two_targets_and_is_not_altered
)
def pruned(patch: pytest.MonkeyPatch) -> None:
    post_init = Alignment.__post_init__

    def pruning(self: Alignment) -> None:
        post_init(self)
        mapped = self.draft_to_target
        self.draft.pieces = tuple(
            piece if mapped[id] >= 0 and id % 2 else b"" for id, piece in enumerate(self.draft.pieces)
        )

    patch.setattr(Alignment, "__post_init__", pruning)


# Stop strings, processors and grammars


def a_stop_string_may_lie_across_tokens() -> None:
    target, drafter = models()
    plain = OmniDraft(target, None).generate("the flake", max_tokens=40).text
    for at in range(8, 20):
        stop = plain[at : at + 4]
        for method in ("direct", "ngram", "prefill", "text"):
            stream = OmniDraft(target, drafter).stream("the flake", max_tokens=40, stop=stop, method=method)
            assert "".join(stream) == plain.partition(stop)[0]


@fault("a stop string is missed, or half shown, across tokens", a_stop_string_may_lie_across_tokens)
def nothing_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode, "_may_begin_stop", lambda text, stop: 0)


def processors_see_accepted_tokens_only() -> None:
    target, drafter = models()
    seen: list[list[int]] = []

    def watch(tokens: Sequence[int], row: Row) -> Row:
        assert len(row) == target.vocab.width  # the target's row and the target's tokens
        seen.append(list(tokens))
        return row

    model = OmniDraft(target, drafter)
    answer = model.generate("the flake", processors=[watch], max_tokens=30)
    start = len(model.prompt_tokens("the flake"))
    assert all(tuple(tokens[start:]) == answer.tokens[: len(tokens) - start] for tokens in seen)
    assert len({len(tokens) for tokens in seen}) == len(seen)


@fault("logits processors see drafts, or a position twice", processors_see_accepted_tokens_only)
def eager(patch: pytest.MonkeyPatch) -> None:
    call = Compare.__call__

    def all_rows(self: Compare, rows, draft, proposal, sampler, ends):  # type: ignore[no-untyped-def]
        for row in rows:
            sampler.law(row)
        return call(self, rows, draft, proposal, sampler, ends)

    patch.setattr(Compare, "__call__", all_rows)


def a_grammar_speaks_the_target_s_vocabulary() -> None:
    pytest.importorskip("llguidance")
    target, drafter = models()
    schema = {
        "type": "object",
        "properties": {"lake": {"type": "string", "maxLength": 9}},
        "required": ["lake"],
        "additionalProperties": False,
    }
    answer = OmniDraft(target, drafter).generate("the flake", json_schema=schema, max_tokens=60)
    assert json.loads(answer.text).keys() == {"lake"}


@fault("a grammar that speaks the drafter's vocabulary", a_grammar_speaks_the_target_s_vocabulary)
def drafter_s_grammar(patch: pytest.MonkeyPatch) -> None:
    grammar = processors.json_schema
    patch.setattr(processors, "json_schema", lambda vocab, schema: grammar(DRAFT, schema))


# Caches and counts


def a_rewound_cache_is_a_fresh_one() -> None:
    target, _ = models()
    session = target.session()
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 9, 4], [7, 8]):
        rows = feed(session, tokens, 1)
        assert np.array_equal(rows, feed(target.session(), tokens, 1))
        assert session.tokens.tolist() == tokens


@fault("a cache that cannot be rewound fails silently", a_rewound_cache_is_a_fresh_one)
def no_rewinding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToySession, "truncate", lambda self, length: None)


def statistics_count_what_was_shown() -> None:
    target, _ = models()
    twin = ToyModel(TARGET, name="twin", seed=1)  # all it drafts is accepted, so steps are long
    plain = OmniDraft(target, None).generate("the flake", max_tokens=40)
    for at in range(4, 20):
        stop = plain.text[at : at + 3]
        shown = next(
            n for n in range(len(plain.tokens)) if stop.encode() in target.vocab.decode(plain.tokens[:n])
        )
        answer = OmniDraft(target, twin).generate("the flake", max_tokens=40, stop=stop, k=8)
        assert answer.stats.tokens == len(answer.tokens) == shown


@fault("statistics that count what was not shown", statistics_count_what_was_shown)
def whole_steps(patch: pytest.MonkeyPatch) -> None:
    def uncut(record, **changes):  # type: ignore[no-untyped-def]
        return record if isinstance(record, Step) else dataclasses.replace(record, **changes)

    patch.setattr(decode, "replace", uncut)


def n_grams_stay_within_their_capacity() -> None:
    target, drafter = models()
    model = OmniDraft(target, drafter, ngram_capacity=1)
    for prompt in ("the flake", "a bird", "the stone", "then", "water by the hills"):
        model.generate(prompt, method="ngram", max_tokens=20)
        model.trie("ngram").insert(TARGET.encode_bytes(CORPUS.encode()))
        assert len(model.trie("ngram", splits=True)) <= 1
    assert len(model._tries) == len(model._translators) == 1


@fault("caches without a bound", n_grams_stay_within_their_capacity)
def never_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trie, "_evict", lambda self, capacity: None)


def defaults_work() -> None:
    target, drafter = models()
    model = OmniDraft(target, drafter)
    assert model.generate("the flake").text == "".join(model.stream("the flake")) != ""
    align.report(DRAFT, TARGET)
    Sampling(), engine.Options().strategy, engine.make_options()


@fault("a default argument that crashes", defaults_work)
def bad_default(patch: pytest.MonkeyPatch) -> None:
    make = engine.make_options
    patch.setattr(engine, "make_options", lambda **options: make(**{"k": 0} | options))


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_not_there_and_would_be_seen(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path_factory.mktemp("home")))
    check, plant = FAULTS[name]
    check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, OmniDraftError, ValueError, IndexError, KeyError)):
        check()
