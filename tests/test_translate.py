from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import CORPUS, toy_vocab

from omnidraft.ngrams import Trie
from omnidraft.spellings import Lexicon
from omnidraft.translate import (
    DraftContext,
    SymbolTranslator,
    TextTranslator,
    Translator,
    crossings,
    retokenise,
    safe_boundary,
)
from omnidraft.types import Draft
from omnidraft.vocab import Alignment

DRAFT, TARGET = toy_vocab(25, order=1), toy_vocab(60, order=2, padding=5)
ALIGNMENT = Alignment(DRAFT, TARGET)
TEXT_TOKENS = [id for id, piece in enumerate(DRAFT.pieces) if piece]


@given(st.text(max_size=20), st.lists(st.sampled_from(TEXT_TOKENS), max_size=8))
def test_text_proposals_spell_the_drafted_bytes(context_text: str, tokens: list[int]) -> None:
    context = TARGET.encode_bytes(context_text.encode("utf-8", "surrogatepass"))
    proposal = TextTranslator(ALIGNMENT).translate(context, Draft(tuple(tokens)))
    drafted, proposed = DRAFT.decode(tokens), TARGET.decode(proposal.tokens)
    assert drafted.startswith(proposed)
    assert bool(proposed) == bool(drafted)
    assert len(drafted) - len(proposed) < 4  # at most an incomplete character is held back


def test_text_merges_and_splits_what_direct_cannot() -> None:
    context = TARGET.encode_bytes(b"then the")
    drafted = [token for piece in (b" ", b"f", b"la", b"k", b"e") for token in DRAFT.encode_bytes(piece)]
    proposal = TextTranslator(ALIGNMENT).translate(context, Draft(tuple(drafted)))
    assert list(proposal.tokens) == TARGET.encode_bytes(b"then the flake")[len(context) :]
    assert len(proposal.tokens) < len(drafted)


def test_a_spelling_that_would_begin_inside_the_context_is_proposed_alone() -> None:
    context = [*TARGET.encode_bytes(b"then the "), *TARGET.encode_bytes(b"l")]
    assert TARGET.encode_bytes(b"then the lake")[: len(context)] != context
    proposal = TextTranslator(ALIGNMENT).translate(context, Draft(tuple(DRAFT.encode_bytes(b"ake"))))
    assert list(proposal.tokens) == TARGET.encode_bytes(b"ake")


def test_an_incomplete_character_is_held_back_unless_it_is_all() -> None:
    text = TextTranslator(ALIGNMENT)
    euro = [DRAFT.id_of[bytes([byte])] for byte in "€".encode()]
    a = DRAFT.id_of[b"a"]
    assert TARGET.decode(text.translate([], Draft((a, *euro[:2]))).tokens) == b"a"
    assert TARGET.decode(text.translate([], Draft(tuple(euro[:2]))).tokens) == "€".encode()[:2]
    assert TARGET.decode(text.translate([], Draft((a, *euro))).tokens) == "a€".encode()


def test_direct_drafts_only_what_has_a_counterpart() -> None:
    alignment = Alignment(TARGET, DRAFT)  # the drafter knows more words here
    direct = SymbolTranslator(Trie(Lexicon.build(alignment), splits=False))
    text = TextTranslator(alignment)
    usable = [np.flatnonzero(translator.usable).tolist() for translator in (direct, text)]
    assert set(usable[0]) < set(usable[1]) < set(range(TARGET.width))
    draft = Draft(tuple(usable[0]))
    assert DRAFT.decode(direct.translate([], draft).tokens) == TARGET.decode(draft.tokens)


@pytest.mark.parametrize(
    "translator", [SymbolTranslator(Trie(Lexicon.build(ALIGNMENT))), TextTranslator(ALIGNMENT)]
)
def test_the_drafter_s_eos_becomes_the_target_s(translator: Translator) -> None:
    proposal = translator.translate([], Draft((DRAFT.id_of[b"a"], DRAFT.eos[0])))
    assert proposal.tokens == (TARGET.id_of[b"a"], TARGET.eos[0])
    assert DRAFT.eos[0] != TARGET.eos[0]


def test_safe_boundary_is_the_start_of_the_last_word() -> None:
    tokens = TARGET.encode_bytes(b"the flake fell")
    start = safe_boundary(TARGET, tokens)
    assert start is not None
    assert TARGET.decode(tokens[start:]) == b" fell"
    assert safe_boundary(TARGET, [TARGET.eos[0]]) == 1
    assert safe_boundary(TARGET, []) == 0
    assert safe_boundary(TARGET, TARGET.encode_bytes(b"x" * 100)) is None


@given(st.lists(st.integers(1, 12), min_size=1))
def test_retokenising_in_parts_gives_the_canonical_spelling(cuts: list[int]) -> None:
    data, tokens, at = CORPUS.encode(), [], 0
    for cut in [*cuts, len(data)]:
        keep, new = retokenise(TARGET, tokens, data[at : at + cut])
        tokens[keep:] = new
        at += cut
    assert tokens == TARGET.encode_bytes(data)


def test_the_draft_context_follows_text_specials_and_bos() -> None:
    context = DraftContext(ALIGNMENT)
    bos, eos, sep = (TARGET.specials[text] for text in ("<bos>", "<eos>", "<sep>"))
    context.extend([bos, *TARGET.encode_bytes(b"the fl")])
    context.extend([*TARGET.encode_bytes(b"ake"), sep, eos, *TARGET.encode_bytes(b"fell")])
    own = DRAFT.specials
    assert context.tokens.tolist() == [
        own["<bos>"],
        *DRAFT.encode_bytes(b"the flake"),
        own["<sep>"],
        own["<eos>"],
        *DRAFT.encode_bytes(b"fell"),
    ]


def test_the_draft_context_leaves_out_specials_without_a_counterpart() -> None:
    from test_vocab import sentencepiece_vocab

    target = sentencepiece_vocab()
    draft = toy_vocab(10)
    context = DraftContext(Alignment(draft, target))
    context.extend([1, *target.encode_bytes(b"ab"), 0, *target.encode_bytes(b" ab")])
    assert context.tokens[0] == draft.bos  # once, whatever the target's begins with
    assert draft.decode(context.tokens[1:]) == b"ab ab"
    assert not set(context.tokens[1:]) & set(draft.specials.values())


def test_crossings_say_how_each_proposed_piece_came_out_of_the_draft() -> None:
    assert crossings([b"ab", b"c", b"def"], [b"ab", b"cd", b"ef"]) == ["direct", "split", "split"]
    assert crossings([b"ab", b"c", b"def"], [b"abc", b"d"]) == ["ngram", "split"]
    assert crossings([b"a"], []) == []
