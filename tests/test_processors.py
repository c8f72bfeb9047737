from __future__ import annotations

import codecs
import gc
import json
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from test_vocab import sentencepiece_vocab
from tokenizers import Tokenizer, decoders, models
from toy import toy_tokenizer, toy_vocab
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from omnidraft import hub, processors
from omnidraft.errors import MissingExtraError, OptionError
from omnidraft.processors import Grammar, as_processor, json_schema, lark, regex
from omnidraft.sampling import Processor
from omnidraft.types import Row
from omnidraft.vocab import Vocab

COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
OBJECT = {
    "type": "object",
    "properties": {"lake": {"enum": ["the flake", "日"]}, "until": {"type": "boolean"}},
    "required": ["lake", "until"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
SENTENCES = {
    json.dumps({"lake": lake, "until": until}, ensure_ascii=False, separators=(",", ":")).encode()
    for lake in ("the flake", "日")
    for until in (False, True)
}


def two_ends() -> Vocab:
    """The tokenizer's end token, `<sep>` as another, and one that the model does not know."""
    tokenizer = toy_tokenizer(60)
    ends = [tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<sep>"), 10**6]
    return Vocab(tokenizer, width=tokenizer.get_vocab_size() + 5, eos=ends)


def few_bytes() -> Vocab:
    """Only `a` and `b`, and an end token that is not marked special."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["abb"])
    return Vocab(tokenizer, eos=[3])


def allowed(vocab: Vocab, processor: Processor, tokens: Sequence[int]) -> set[int]:
    """The ids that the processor leaves; it must leave their logits, and the row it was given, as they are."""
    row = np.random.default_rng(len(tokens)).standard_normal(vocab.width, dtype=np.float32)
    given = row.copy()
    changed = processor(tokens, row)
    assert np.array_equal(row, given)
    assert changed.dtype == row.dtype
    kept = changed != -np.inf
    assert np.array_equal(changed[kept], row[kept])
    return set(np.flatnonzero(kept).tolist())


def expected(vocab: Vocab, text: bytes, possible: Callable[[bytes], bool], complete: bool) -> set[int]:
    """By brute force: ids whose bytes keep the answer possible, and the ends where it is complete."""
    ends = {id for id in vocab.eos if id < vocab.size}
    ids = {id for id, piece in enumerate(vocab.pieces) if piece and id not in ends and possible(text + piece)}
    return ids | (ends if complete else set())


VOCABS = [toy_vocab(60, padding=9), toy_vocab(20, order=3), sentencepiece_vocab(), two_ends()]


@pytest.mark.parametrize("vocab", VOCABS)
def test_allowed_is_exactly_what_keeps_the_document_possible(vocab: Vocab) -> None:
    grammar = json_schema(vocab, OBJECT)
    generator = random.Random(0)
    prompt = [1, 2, 3]
    reached = set()
    for _ in range(12):
        processor, tokens = grammar.processor(len(prompt)), list(prompt)
        while tokens[-1] not in vocab.eos or tokens == prompt:
            text = vocab.decode(tokens[len(prompt) :])
            ids = allowed(vocab, processor, tokens)
            assert ids == expected(
                vocab, text, lambda new: any(s.startswith(new) for s in SENTENCES), text in SENTENCES
            )
            tokens.append(generator.choice(sorted(ids)))
        reached.add(vocab.decode(tokens[len(prompt) :]))
    assert reached == SENTENCES


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(
    "text", ["", '"', '"the \u65e5'.encode(), b'"\xe6', b'"\xe6\x97', b'"\xf0\x9f', b'"\xe0']
)
def test_characters_in_parts_inside_a_string(vocab: Vocab, text: bytes | str) -> None:
    data = text.encode() if isinstance(text, str) else text

    def possible(new: bytes) -> bool:  # JSON would permit DEL; llguidance wants it escaped
        if (
            not new.startswith(b'"')
            or new.find(b'"', 1) not in (-1, len(new) - 1)
            or min(new) < 32
            or 127 in new
        ):
            return False
        try:
            codecs.getincrementaldecoder("utf-8")().decode(new)
        except UnicodeDecodeError:
            return False
        return True

    tokens = [next(id for id, piece in enumerate(vocab.pieces) if piece == bytes([byte])) for byte in data]
    ids = allowed(vocab, json_schema(vocab, '{"type": "string"}').processor(0), tokens)
    assert ids == expected(vocab, data, possible, complete=False)


def test_the_end_is_allowed_only_at_the_end_and_nothing_else_there() -> None:
    vocab = two_ends()
    processor = regex(vocab, "the( lake)?").processor(0)
    assert not allowed(vocab, processor, tokens := []) & set(vocab.eos)
    assert allowed(vocab, processor, tokens := [*tokens, *vocab.encode_bytes(b"the")]) > set(vocab.eos[:2])
    assert allowed(vocab, processor, tokens := [*tokens, *vocab.encode_bytes(b" lake")]) == set(vocab.eos[:2])
    assert allowed(vocab, processor, tokens := [*tokens, vocab.eos[1]]) == set(vocab.eos[:2])


def test_an_end_token_is_never_text() -> None:
    vocab = few_bytes()
    assert vocab.pieces[3] == b"abb"
    processor = regex(vocab, "[ab]{3}").processor(0)
    assert allowed(vocab, processor, []) == {0, 1, 2}
    assert allowed(vocab, processor, [2, 1]) == {3}


def test_specials_only_where_a_grammar_names_them() -> None:
    vocab = toy_vocab(30, padding=9)
    assert not allowed(vocab, regex(vocab, "(?s).*").processor(0), []) & {*vocab.specials.values()} - {
        *vocab.eos
    }
    assert allowed(vocab, lark(vocab, "start: <sep>").processor(0), []) == {vocab.specials["<sep>"]}


def test_padding_is_never_allowed() -> None:
    vocab = toy_vocab(30, padding=70)
    for grammar in (regex(vocab, "(?s).*"), lark(vocab, "start: <[*]>")):
        assert max(allowed(vocab, grammar.processor(0), [])) < vocab.size


def test_state_moves_by_new_tokens_only() -> None:
    vocab = toy_vocab(60)
    grammar = json_schema(vocab, OBJECT)
    answer = vocab.encode_bytes(min(SENTENCES))
    prompt = vocab.encode_bytes(b"a prompt that is no JSON")
    step, leap = grammar.processor(len(prompt)), grammar.processor(len(prompt))
    for i in range(len(answer) + 1):
        ids = allowed(vocab, step, [*prompt, *answer[:i]])
        assert allowed(vocab, grammar.processor(len(prompt)), [*prompt, *answer[:i]]) == ids
        if i % 3 == 0:
            forgotten = [-1] * (len(prompt) + max(0, i - 3))  # what it has seen it does not look at again
            assert allowed(vocab, leap, [*forgotten, *answer[max(0, i - 3) : i]]) == ids
            assert allowed(vocab, leap, [*prompt, *answer[:i]]) == ids


def test_a_row_without_its_padding() -> None:
    vocab = toy_vocab(30, padding=9)
    row = np.zeros(vocab.width, dtype=np.float64)
    grammar = regex(vocab, "the")
    short = grammar.processor(0)([], row[: vocab.size])
    assert short.dtype == np.float64
    assert np.array_equal(short, grammar.processor(0)([], row)[: vocab.size])


def test_a_token_outside_the_grammar() -> None:
    vocab = toy_vocab(30)
    with pytest.raises(
        OptionError, match=r"^token \d+ at position 1 is outside the grammar: [^\n]*; put [^\n]*$"
    ):
        regex(vocab, "the").processor(1)([0, *vocab.encode_bytes(b"lake")], np.zeros(vocab.width))


def test_a_dead_end_is_not_taken_for_the_end() -> None:
    vocab = few_bytes()
    processor = regex(vocab, "a+z").processor(0)
    assert allowed(vocab, processor, []) == {0}
    with pytest.raises(OptionError, match="no token spells"):
        regex(vocab, "az").processor(0)([0], np.zeros(vocab.width))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("[1", "not JSON"),
        ("[1]", "must be an object"),
        ({"type": {1, 2}}, "not JSON"),
        ({"type": "number of hills"}, "Invalid type"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_a_bad_schema_is_refused_with_the_reason(schema: object, reason: str) -> None:
    with pytest.raises(OptionError, match=rf"^[^\n]*{reason}[^\n]*; [^\n]*$"):
        json_schema(toy_vocab(10), schema)  # type: ignore[arg-type]


def test_bad_grammars_are_refused() -> None:
    for make in (lambda v: regex(v, "("), lambda v: lark(v, "start: hill"), lambda v: lark(v, "")):
        with pytest.raises(OptionError, match=r"^the grammar is refused: [^\n]*$"):
            make(toy_vocab(10))
    with pytest.raises(OptionError, match="no end token"):
        regex(Vocab(toy_tokenizer(10)), "a")


def test_schemas_keep_odd_text() -> None:
    vocab = toy_vocab(10)
    odd = '} // "\\ \n %llguidance {} \U0001f642 é'
    answer = vocab.encode_bytes(json.dumps(odd, ensure_ascii=False).encode())
    assert allowed(vocab, json_schema(vocab, {"const": odd}).processor(0), answer) == {*vocab.eos}
    for pattern, text in [('a/b"\\\\\n', b'a/b"\\\n'), ("", b""), (r"\d/", "٣/".encode())]:
        assert allowed(vocab, regex(vocab, pattern).processor(0), vocab.encode_bytes(text)) == {*vocab.eos}


def test_one_table_a_vocabulary_and_none_after_it() -> None:
    vocab = toy_vocab(10)
    first, second = regex(vocab, "a"), json_schema(vocab, {})
    assert first._table is second._table
    gone = weakref.ref(vocab)
    del vocab
    gc.collect()
    assert gone() is None


def test_missing_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"omnidraft\[grammar\]"):
        json_schema(toy_vocab(10), {})


class InPlace(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids[0, -1]] = -1.0
        return scores


@pytest.mark.parametrize(
    "processor",
    [
        RepetitionPenaltyLogitsProcessor(1.3),
        MinLengthLogitsProcessor(9, eos_token_id=2, device="cpu"),
        SuppressTokensLogitsProcessor([3, 5], device="cpu"),
        InPlace(),
        LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(0.8), InPlace(), MinLengthLogitsProcessor(9, 2, device="cpu")]
        ),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_transformers_processors_do_what_they_do_there(processor: object, dtype: type) -> None:
    row: Row = np.random.default_rng(0).standard_normal(300).astype(dtype)
    for tokens in ([7, 7, 250], (7, 7, 250, *range(8))):
        given = row.copy()
        changed = as_processor(processor)(tokens, row)
        assert np.array_equal(row, given)
        scores = torch.from_numpy(row.astype(np.float32))[None].clone()
        direct = processor(torch.tensor([tokens]), scores)  # type: ignore[operator]
        assert changed.dtype == dtype
        assert np.array_equal(changed, direct[0].numpy().astype(dtype))


def test_what_a_processor_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(tokens: Sequence[int], row: Row) -> Row:
        return row - 1

    assert as_processor(mine) is mine
    for wrong in (3, [mine], MinLengthLogitsProcessor, json_schema(toy_vocab(10), {})):
        with pytest.raises(OptionError, match="; pass"):
            as_processor(wrong)
    monkeypatch.delitem(sys.modules, "transformers.generation.logits_process")
    assert as_processor(mine) is mine
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"omnidraft\[hf\]"):
        processors.transformers_processor(InPlace())


@pytest.mark.models
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_real_vocabularies(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(Path(hub.pull(name)) / "tokenizer.json"))
    ends = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    vocab = Vocab(tokenizer, width=tokenizer.get_vocab_size() + 271, eos=ends)
    grammar: Grammar = json_schema(vocab, {"type": "array", "items": {"type": ["string", "integer"]}})
    text = '["two rivers, \U0001f642 日本", -12, "\\n"]'
    answer = vocab.encode_bytes(text.encode())
    assert vocab.decode(answer) == text.encode()
    processor = grammar.processor(0)
    for i, token in enumerate(answer):
        ids = allowed(vocab, processor, answer[:i])
        assert token in ids
        assert not ids & {*ends, *vocab.special_text, *range(vocab.size, vocab.width)}
        if i == 1:
            assert len(ids) > 0.5 * vocab.size  # almost anything may stand in a string
    assert allowed(vocab, processor, answer) == {*ends}
