"""GGUF headers, and the tokenizers and chat templates they describe, against what transformers makes of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_gguf import CONTEXT, tiny_module, write_gguf
from toy import CORPUS, toy_tokenizer

from omnidraft import hub
from omnidraft.backends.gguf_model import GgufModel
from omnidraft.errors import DamagedFileError, OptionError, VocabularyError
from omnidraft.gguf_file import Gguf, is_gguf, read_gguf
from omnidraft.gguf_tokenizer import build_tokenizer

MESSAGES = [
    {"role": "user", "content": "Hi  there"},
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "naïve 日本語 🙂 <|im_end|>"},
]
TEXTS = [
    "Hello  world\n\n\tx = 1234567 it's I'LL we'Ve",
    " leading and trailing \r\n\r\n  ",
    "naïve café e\u0301 日本語 العربية 🙂👩‍👩‍👧 ½ ٣",
    "a<|im_end|>b<bos><tool_call>\t\t\n\n\n",
    "a\u2581b\x00\x01\x7f",
    "",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", 30)


def test_the_header_is_what_was_written(tiny: Path) -> None:
    facts = read_gguf(tiny)
    assert is_gguf(tiny)
    assert facts.parameters == sum(weight.numel() for weight in tiny_module(30).state_dict().values())
    assert facts.architecture == "qwen2"
    assert facts.context_length == CONTEXT
    assert facts.of_architecture("attention.head_count_kv") == 2
    assert facts.fields["tokenizer.ggml.add_bos_token"] is True
    assert (facts.bos, facts.eos, facts.unknown, facts.chat_template) == ("<bos>", "<eos>", None, None)
    assert facts.ends == [facts.tokens.index("<eos>")]


def test_the_tokenizer_is_the_one_that_was_written(tiny: Path) -> None:
    tokenizer, original = build_tokenizer(read_gguf(tiny), "tiny"), toy_tokenizer(30)
    assert tokenizer.get_vocab() == original.get_vocab()
    for text in (CORPUS, "<sep> é\n"):
        assert tokenizer.encode(text).ids == [original.token_to_id("<bos>"), *original.encode(text).ids]


def test_damaged_files_are_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    for data in (b"", b"GGUF", b"no" + whole, whole[:8], whole[:3000], whole[: len(whole) // 2]):
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(data)
        with pytest.raises(DamagedFileError, match="fetch or export it again"):
            read_gguf(damaged)


@pytest.mark.parametrize("fields", [{"tokenizer": "bert"}, {"pre": "kimi-k2"}])
def test_unknown_tokenizers_are_refused(tmp_path: Path, fields: dict[str, str]) -> None:
    file = write_gguf(tmp_path / "unknown.gguf", 5, fields=fields)
    with pytest.raises(VocabularyError, match=next(iter(fields.values()))):
        GgufModel(read_gguf(file), "unknown")


@pytest.mark.parametrize("change", ["token_types", "merges", "unknown merge"])
def test_tokenizers_that_do_not_hold_together_are_refused(tiny: Path, change: str) -> None:
    facts = read_gguf(tiny)
    fields = dict(facts.fields)
    if change == "token_types":
        facts = dataclasses.replace(facts, token_types=facts.token_types[:-1])
    else:
        fields["tokenizer.ggml.merges"] = 7 if change == "merges" else ["never seen"]
    with pytest.raises(DamagedFileError, match="does not hold together"):
        build_tokenizer(dataclasses.replace(facts, fields=fields), "tiny")


def with_template(file: Path, template: str) -> GgufModel:
    return GgufModel(dataclasses.replace(read_gguf(file), chat_template=template), "tiny")


def test_templates_are_rendered_as_transformers_does(tiny: Path) -> None:
    import transformers

    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ message | tojson }}{% endgeneration %}\n"
        "{% endfor %}{% if add_generation_prompt %}<sep>{% endif %}"
    )
    model = with_template(tiny, template)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=toy_tokenizer(30), bos_token="<bos>")
    reference.chat_template = template
    text = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert model.chat(MESSAGES) == toy_tokenizer(30).encode(text).ids


def test_a_template_may_refuse_or_be_missing(tiny: Path) -> None:
    with pytest.raises(OptionError, match="no system role"):
        with_template(tiny, "{{ raise_exception('no system role') }}").chat(MESSAGES)
    with pytest.raises(OptionError, match="refuses"):
        with_template(tiny, "{{ messages.__class__.__mro__ }}").chat(MESSAGES)
    model = GgufModel(read_gguf(tiny), "tiny")
    assert model.chat(MESSAGES[:1]) == model.encode("Hi  there")


@pytest.mark.models
@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m",
        "qwen2.5-coder-0.5b",
        pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.full),
        pytest.param("gemma3-270m", marks=pytest.mark.full),
    ],
)
def test_vocabularies_agree_with_upstream_s_tokenizer_json(name: str) -> None:
    """Bytes, special tokens, encodings and chats, against transformers and the checkpoint."""
    import transformers

    from omnidraft.backends.checkpoint import load_vocab

    checkpoint = hub.resolve(name)
    facts: Gguf = read_gguf(checkpoint.parent / "model.gguf")
    model, reference = GgufModel(facts, name), load_vocab(checkpoint, name)
    vocab = model.vocab
    assert vocab.pieces == reference.pieces
    assert vocab.fingerprint == reference.fingerprint
    assert (vocab.size, vocab.width, vocab.bos, vocab.eos) == (
        reference.size, reference.width, reference.bos, reference.eos,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for text in [*TEXTS, json.dumps(MESSAGES), (checkpoint / "config.json").read_text()]:
        assert model.encode(text) == tokenizer(text).input_ids
        assert vocab.encode_bytes(text.encode()) == reference.encode_bytes(text.encode())
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert model.chat(MESSAGES) == tokenizer(text, add_special_tokens=False).input_ids
