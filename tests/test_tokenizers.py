"""Every tokenizer family on real tokenizers: ids as bytes, and every pair of drafter and target."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterable
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import ALL, SMALL, tokenizer_of, vocab_of

from omnidraft.backends import checkpoint
from omnidraft.errors import DamagedFileError, VocabularyError
from omnidraft.ngrams import Trie
from omnidraft.spellings import Lexicon
from omnidraft.translate import DraftContext, SymbolTranslator, TextTranslator, Translator
from omnidraft.types import Draft
from omnidraft.vocab import Alignment, Vocab

ROOT = Path(__file__).parents[1]
BRIEF = settings(max_examples=25, deadline=None)
# Stretches that tokenizers treat in ways of their own.
TEXTS = (
    "the flake fell",
    "def f(x):\n\treturn x  # 12345\n\n\n    ",
    "日本語の文章。中文，한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301n\u0303 \u0915\u094d\u0937 Z̷̛a",
    "שלום עולם مرحبا بالعالم",
    "        \t\t \r\n \u00a0\u2003\u200b",
    "\u2581a\u2581\u2581 \u2581",
    "<s></s><unk>[INST]<|im_start|><tool_call><0x0A>##ing [CLS]",
    "ＡＢＣ ﬁ ½ ǅ İ",
    "Don't, won't. I'm! ?",
)
text = st.lists(st.sampled_from(TEXTS) | st.text(max_size=6), max_size=4).map("".join)
data = text.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=12)


def marked(names: Iterable[str | tuple[str, ...]]) -> list[ParameterSet]:
    """Those of the small tokenizers run always, all others under `make test-full`."""
    return [
        pytest.param(
            name,
            id=" to ".join(all_of),
            marks=() if SMALL.keys() >= set(all_of) else pytest.mark.full,
        )
        for name in names
        for all_of in [(name,) if isinstance(name, str) else name]
    ]


def tokens_of(vocab: Vocab) -> list[int]:
    return [id for id, piece in enumerate(vocab.pieces) if piece]


# One by one


@pytest.mark.parametrize("name", marked(ALL))
@settings(max_examples=150, deadline=None)
@given(data=data)
def test_the_pieces_of_an_encoding_spell_the_bytes(name: str, data: bytes) -> None:
    vocab = vocab_of(name)
    spelled = vocab.decode(vocab.encode_bytes(data))
    known = {byte for byte in range(256) if vocab._byte_tokens[byte] is not None}
    if name == "wordpiece":
        # It has its own spaces, and the normalised text's characters in order, without its unknown words.
        normalizer = tokenizer_of(name).backend_tokenizer.normalizer
        rest = iter("".join(normalizer.normalize_str(data.decode("utf-8", "ignore")).split()))
        assert all(char in rest for char in "".join(spelled.decode().split()))
    else:
        # Nothing but the bytes without a token is missing, and nothing is in another place.
        assert spelled == bytes(byte for byte in data if byte in known)


@pytest.mark.parametrize("name", marked(ALL))
def test_every_byte_that_the_vocabulary_holds_can_be_spelled(name: str) -> None:
    vocab = vocab_of(name)
    held = [bytes([byte]) for byte in range(256) if vocab._byte_tokens[byte] is not None]
    assert len(held) == {"wordpiece": 68, "smollm2-135m": 235}.get(name, 256)
    for byte in held:
        if byte.isalnum() or name != "wordpiece":
            assert vocab.decode(vocab.encode_bytes(byte)) == byte.lower() if name == "wordpiece" else byte


@pytest.mark.parametrize("name", marked(ALL))
@BRIEF
@given(draw=st.data())
def test_the_pieces_joined_are_what_the_tokenizer_decodes(name: str, draw: st.DataObject) -> None:
    vocab, tokenizer = vocab_of(name), tokenizer_of(name).backend_tokenizer
    (begun,) = vocab.encode_bytes(b"x")
    tokens = draw.draw(st.lists(st.sampled_from(tokens_of(vocab)), max_size=12))
    joined = vocab.decode(tokens)
    try:
        shown = joined.decode()
    except UnicodeDecodeError:
        return  # how many U+FFFD a decoder writes is its own affair
    start, whole = (tokenizer.decode([begun, *more], skip_special_tokens=False) for more in ((), tokens))
    assert whole == start + shown


@pytest.mark.parametrize("name", marked(ALL))
def test_the_encoder_and_the_tokenizer_agree_on_plain_text(name: str) -> None:
    """What is changed for the bytes' sake changes nothing in the middle of plain text."""
    vocab, tokenizer = vocab_of(name), tokenizer_of(name).backend_tokenizer
    begun, plain = "in the lake", " the flake fell into the water. then 3 birds stood on the stone"
    whole = tokenizer.encode(begun + plain, add_special_tokens=False).ids
    start = tokenizer.encode(begun, add_special_tokens=False).ids
    assert vocab.encode_bytes(plain.encode()) == whole[len(start) :]
    assert vocab.encode_many([plain.encode()]) == [whole[len(start) :]]


@pytest.mark.parametrize("name", marked(ALL))
def test_of_several_ids_with_the_same_bytes_one_is_canonical(name: str) -> None:
    vocab = vocab_of(name)
    assert set(vocab.id_of) == set(vocab.pieces) - {b""}
    assert all(vocab.pieces[id] == piece for piece, id in vocab.id_of.items())


@pytest.mark.parametrize("name", marked(ALL))
def test_padding_has_no_bytes(name: str) -> None:
    narrow = vocab_of(name)
    wide = Vocab(tokenizer_of(name).backend_tokenizer, width=narrow.size + 100)
    assert wide.pieces == (*narrow.pieces, *[b""] * 100)
    assert wide.fingerprint == narrow.fingerprint
    assert Alignment(wide, narrow).same


# Files of other kinds


def tekken_file(folder: Path, *, named: bool) -> Path:
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"beyond the vocabulary"]
    record = {
        "config": {
            "pattern": r" ?\\w+|\\W",
            "default_vocab_size": 30 + 259,
            "default_num_special_tokens": 30,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate(pieces)
        ],
    }
    if named:
        names = ("<unk>", "<s>", "</s>", "[THINK]")
        record["special_tokens"] = [{"rank": i, "token_str": name} for i, name in enumerate(names)]
    (folder / "tekken.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("named", [True, False])
def test_a_tekken_file_is_a_tokenizer(named: bool, tmp_path: Path) -> None:
    tokenizer = checkpoint._load_tokenizer(tekken_file(tmp_path, named=named), "toy")
    vocab = checkpoint._read_vocab(tokenizer, "toy", width=300, eos=None)
    assert [vocab.pieces[id] for id in vocab.encode_bytes(b"the the \xff")] == [
        b"the",
        b" the",
        b" ",
        b"\xff",
    ]
    assert (vocab.size, vocab.width, vocab.bos, vocab.eos) == (289, 300, 1, (2,))
    assert vocab.special_text[3] == ("[THINK]" if named else "[INST]")
    assert vocab.special_text[29] == "<SPECIAL_29>"
    assert tokenizer("[INST]the").input_ids[:2] == [1, 3] if not named else [1]


@pytest.mark.parametrize("text", ["{", "{}", '{"config": [], "vocab": 3}'])
def test_a_damaged_tekken_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"tekken\.json cannot be read.*; "):
        checkpoint._load_tokenizer(tmp_path, "toy")


def test_a_tiktoken_file_is_a_tokenizer(tmp_path: Path) -> None:
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    vocab = Vocab(checkpoint._load_tokenizer(tmp_path, "toy").backend_tokenizer)
    assert [vocab.pieces[id] for id in vocab.encode_bytes(b"the the \xff")] == [
        b"the",
        b" the",
        b" ",
        b"\xff",
    ]


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(VocabularyError, match=r"toy has no tokenizer.*; put"):
        checkpoint._load_tokenizer(tmp_path, "toy")


# Pair by pair


@lru_cache(maxsize=1)
def translators(pair: tuple[str, str]) -> dict[str, Translator]:
    lexicon = Lexicon.build(Alignment(*map(vocab_of, pair)))
    full, grown = Trie(lexicon), Trie(lexicon)
    full.fill()
    grown.insert(lexicon.target.ids[::3].tolist())
    return {
        "direct": SymbolTranslator(Trie(lexicon, splits=False)),
        "ngram": SymbolTranslator(grown, grow=True),
        "prefill": SymbolTranslator(full),
        "prefill, walked": SymbolTranslator(full, walk=True),
        "text": TextTranslator(lexicon.alignment),
    }


PAIRS = marked(permutations(ALL, 2))


@pytest.mark.parametrize("pair", PAIRS, scope="module")
@BRIEF
@given(draw=st.data(), before=data)
def test_a_proposal_spells_the_drafted_bytes(
    pair: tuple[str, str], draw: st.DataObject, before: bytes
) -> None:
    draft, target = map(vocab_of, pair)
    context = target.encode_bytes(before)
    written = draft.encode_bytes(draw.draw(data))
    for name, translator in translators(pair).items():
        usable = np.flatnonzero(translator.usable).tolist()
        drawn = draw.draw(st.lists(st.sampled_from(usable), max_size=6))
        tokens = [token for token in written if translator.usable[token]] + drawn
        drafted = draft.decode(tokens)
        proposal = translator.translate(context, Draft(tuple(tokens)))
        proposed = target.decode(proposal.tokens)
        assert drafted.startswith(proposed)
        if name in ("direct", "ngram", "prefill") and not set(tokens) & translator.ends:
            assert proposed == drafted
            assert sum(proposal.lengths) >= len(proposal.tokens)
        if name == "text" and target._complete and not set(tokens) & translator.ends:
            assert len(drafted) - len(proposed) < 4  # at most an incomplete character is held back
            assert bool(proposed) == bool(drafted)


@pytest.mark.parametrize("pair", PAIRS, scope="module")
@BRIEF
@given(draw=st.data())
def test_the_drafter_sees_the_target_s_text(pair: tuple[str, str], draw: st.DataObject) -> None:
    """Special and padded tokens, bytes that it cannot spell, in any order and in any steps."""
    alignment = translators(pair)["text"].alignment
    draft, target = alignment.draft, alignment.target
    token = st.sampled_from(tokens_of(target)) | st.integers(0, target.width - 1)
    steps = draw.draw(st.lists(data.map(target.encode_bytes) | st.lists(token, max_size=6), max_size=4))
    context = DraftContext(alignment)
    for step in steps:
        context.extend(step)
    shown, wanted = draft.decode(context.tokens), target.decode([token for step in steps for token in step])
    matched = set(alignment.special_draft_to_target)
    assert all(draft.pieces[token] or token in matched for token in context.tokens)
    if draft._complete:
        spaces = 1 + sum(not target.pieces[token] for step in steps for token in step)
        assert len(wanted) <= len(shown) <= len(wanted) + spaces  # it may put spaces where a text begins
        assert shown.replace(b" ", b"") == wanted.replace(b" ", b"")


# How many tokens vocabularies share (docs/tokenizers.md)


def shared() -> ModuleType:
    path = ROOT / "benchmarks" / "shared_vocabularies.py"
    spec = importlib.util.spec_from_file_location("shared_vocabularies", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COUNTS = json.loads((ROOT / "results" / "shared_vocabularies.json").read_text())["counts"]


def test_the_table_is_made_of_the_counts() -> None:
    assert shared().table(COUNTS) in (ROOT / "docs" / "tokenizers.md").read_text()


@pytest.mark.full
def test_the_counts_are_those_of_the_tokenizers() -> None:
    for row in COUNTS:
        assert shared().count(row["drafter"], row["target"]) == row
        alignment = Alignment(vocab_of(row["drafter"]), vocab_of(row["target"]))
        assert alignment.shared >= row["bytes"]  # more by the ids that have the same bytes


def test_the_shared_tokens_of_two_small_ones() -> None:
    counted = shared().count("mistral-v1", "wordpiece")
    target, draft = vocab_of("wordpiece"), vocab_of("mistral-v1")
    assert counted["bytes"] == len({piece for piece in draft.pieces if piece and piece in target.id_of})
    assert counted["string"] <= counted["display"] < counted["bytes"]
