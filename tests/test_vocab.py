from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from toy import toy_tokenizer, toy_vocab

from omnidraft.errors import VocabularyError
from omnidraft.types import as_tokens
from omnidraft.vocab import Alignment, Vocab, runs


def sentencepiece_vocab(**specials: int) -> Vocab:
    """Llama 2's form: U+2581 for spaces, a space put in front, bytes as `<0x..>`; `a` is there twice."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "ab", "\u2581ab", "\u2581\u2581"]
    merges = [("a", "b"), ("\u2581", "ab"), ("\u2581", "\u2581")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: id for id, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Vocab(tokenizer, bos=1, eos=[2])


@pytest.mark.parametrize("vocab", [toy_vocab(30), toy_vocab(60, order=5, padding=9), sentencepiece_vocab()])
def test_pieces_of_an_encoding_spell_the_bytes(vocab: Vocab) -> None:
    for text in ["the flake", " a b  ab", "日本語 🙂é", "\t\n\r\n  x", "<s><eos>"]:
        assert vocab.decode(vocab.encode_bytes(text.encode())) == text.encode()
    generator = random.Random(0)
    for _ in range(200):
        data = generator.randbytes(generator.randrange(12))
        assert vocab.decode(vocab.encode_bytes(data)) == data


@given(st.text())
def test_any_text_survives(text: str) -> None:
    vocab = toy_vocab(40)
    data = text.encode("utf-8", "surrogatepass")
    assert vocab.decode(vocab.encode_bytes(data)) == data


def test_sentencepiece_has_no_space_of_its_own() -> None:
    vocab = sentencepiece_vocab()
    assert [vocab.pieces[token] for token in vocab.encode_bytes(b"ab ab")] == [b"ab", b" ab"]
    assert vocab.pieces[vocab.encode_bytes(b"\n")[0]] == b"\n"


def test_of_two_ids_with_the_same_bytes_the_encoder_s_own_is_canonical() -> None:
    vocab = sentencepiece_vocab()
    same = [id for id, piece in enumerate(vocab.pieces) if piece == b"a"]
    assert len(same) == 2
    assert vocab.id_of[b"a"] == max(
        same
    )  # the byte token comes first in the table, but is never used for text


def test_padding_and_specials_have_no_bytes() -> None:
    vocab = toy_vocab(10, padding=7)
    assert vocab.width == vocab.size + 7
    assert all(vocab.pieces[id] == b"" for id in [*vocab.specials.values(), *range(vocab.size, vocab.width)])


def test_alignment_is_by_bytes_and_specials_by_text_and_role() -> None:
    draft, target = toy_vocab(20, order=1), toy_vocab(60, order=2, padding=3)
    alignment = Alignment(draft, target)
    for id, mapped in enumerate(alignment.draft_to_target):
        if mapped >= 0 and id not in alignment.special_draft_to_target:
            assert draft.pieces[id] == target.pieces[mapped]
    assert alignment.shared == len(set(draft.pieces) & set(target.pieces)) - 1  # but for b""
    assert alignment.special_draft_to_target == {
        id: target.specials[text] for text, id in draft.specials.items()
    }
    other = Alignment(draft, sentencepiece_vocab())
    assert other.special_draft_to_target == {
        draft.eos[0]: 2,
        draft.bos: 1,
    }  # by role; <sep> has no counterpart


def test_equal_tables_have_equal_fingerprints_and_equal_sizes_do_not() -> None:
    assert toy_vocab(30, order=1).fingerprint == toy_vocab(30, order=1, padding=4).fingerprint
    assert toy_vocab(30, order=1).size == toy_vocab(30, order=2).size
    assert toy_vocab(30, order=1).fingerprint != toy_vocab(30, order=2).fingerprint


def test_runs_separate_text_from_specials() -> None:
    vocab = toy_vocab(30)
    eos = vocab.eos[0]
    tokens = [eos, *vocab.encode_bytes(b"the lake"), eos, eos, *vocab.encode_bytes(b"x")]
    assert list(runs(vocab, tokens)) == [eos, b"the lake", eos, eos, b"x"]


def wordpiece_vocab() -> Vocab:
    words = ["[UNK]", "[SEP]", "the", "lake", "s", ".", "-", "##s", "##ake", "##l", "l", "##."]
    tokenizer = Tokenizer(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return Vocab(tokenizer)


def test_wordpiece_begins_words_with_a_space() -> None:
    vocab = wordpiece_vocab()

    def spelled(text: str) -> list[bytes]:
        return [vocab.pieces[token] for token in vocab.encode_bytes(text.encode())]

    assert spelled(" the lakes.") == [b" the", b" lake", b"s", b"."]
    assert spelled("lakes") == [b"l", b"ake", b"s"]  # the rest of a word
    assert spelled(" The  LAKE") == [b" the", b" lake"]
    assert spelled(" the x") == [b" the"]
    assert spelled("-") == [b" -"]  # and not what was asked for: callers compare
    assert vocab.id_of[b"."] == 5


def test_a_text_is_normalised_only_where_it_cannot_be_spelled() -> None:
    """A Unigram without byte fallback, as T5's, whose pre-tokenizer throws white space away."""
    pieces = [("<unk>", 0.0), ("\u2581", -3.0), ("\u2581a", -1.0), ("a", -2.0), ("b", -2.0), ("\u00e9", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    vocab = Vocab(tokenizer)
    assert vocab.decode(vocab.encode_bytes(b" a  b")) == b" a  b"
    assert vocab.decode(vocab.encode_bytes("\uff41b e\u0301x".encode())) == "ab \u00e9".encode()
    assert vocab.encode_many([b" a b"]) == [vocab.encode_bytes(b" a b")]
    assert vocab.encode_bytes(b"<unk>") == []


def test_the_space_before_a_text_is_the_tokenizer_s() -> None:
    llama, gpt = sentencepiece_vocab(), toy_vocab(10)
    assert llama.opened([], b"ab") == llama.opened([1], b"ab") == b" ab"
    assert llama.opened(llama.encode_bytes(b"ab"), b"ab") == b"ab"
    assert gpt.opened([], b"ab") == b"ab"
    assert wordpiece_vocab().opened([1], b"the") == b" the"
    tokenizer = toy_tokenizer(10)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    first = Vocab(tokenizer, bos=tokenizer.token_to_id("<bos>"))
    sep = first.specials["<sep>"]
    assert [first.opened(as_tokens(context), b"ab") for context in ([], [first.bos], [sep])] == [
        b" ab",
        b" ab",
        b"ab",
    ]


@pytest.mark.parametrize("decoder", [None, decoders.BPEDecoder(), decoders.CTC(), decoders.Fuse()])
def test_a_tokenizer_whose_tokens_do_not_spell_bytes_is_refused(decoder: object) -> None:
    words = {"<unk>": 0, "a": 1, "b</w>": 2, "<pad>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    if decoder:
        tokenizer.decoder = decoder
    if isinstance(decoder, decoders.Fuse):
        tokenizer.decoder = decoders.Sequence([decoders.Strip("a", 1, 0), decoder])
    with pytest.raises(VocabularyError, match="WordLevel"):
        Vocab(tokenizer)
