"""The tokenizer that a GGUF file describes: its vocabulary and merges, and the splitting its model was trained with.

A GGUF holds no tokenizer.json, only names for families of splittings. What belongs to a name is upstream's
tokenizer.json; llama.cpp's own expressions (src/llama-vocab.cpp) are adapted to its engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from omnidraft.errors import DamagedFileError, VocabularyError
from omnidraft.gguf_file import Gguf
from omnidraft.pieces import CHAR_OF

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # the format's types of tokens
_METASPACE = "\u2581"


@dataclass(frozen=True)
class _Splitting:
    """How byte-level BPE cuts text into words before it merges. Without expressions: as GPT-2 did."""

    expressions: tuple[str, ...] = ()
    digits: bool = False  # each apart, before anything else
    nfc: bool = False
    whole_words: bool = False  # a word that is a token stays one, whatever the merges would make of it


def _words(numbers: str, *, letters: str = r"\p{L}", after: str = r"\r\n") -> str:
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}"
        rf"| ?[^\s{letters.strip('[]')}\p{{N}}]+[{after}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(contraction: str, numbers: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = _Splitting()
_DIGITS = _Splitting(digits=True)
_LLAMA3 = _Splitting((_words(r"\p{N}{1,3}"),), whole_words=True)
_QWEN2 = _Splitting((_words(r"\p{N}"),))
_GPT4O = _Splitting((_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = _Splitting(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
# By the file's `tokenizer.ggml.pre`.
_SPLITTINGS: Mapping[str, _Splitting] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("exaone4", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("lfm2", "glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Splitting(_LLAMA3.expressions)),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"), _QWEN2),
    "qwen2": _Splitting(_QWEN2.expressions, nfc=True),
    "qwen35": _Splitting((_words(r"\p{N}", letters=r"[\p{L}\p{M}]"),), nfc=True),
    "tekken": _Splitting((_cased("", r"\p{N}"),), whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
}  # fmt: skip


def build_tokenizer(facts: Gguf, name: str) -> Tokenizer:
    """The tokenizer of a GGUF file, its BOS put first where the file says so.

    Raises:
        VocabularyError: a kind of tokenizer, or a splitting, that we do not know.
        DamagedFileError: tokens, their types, merges and scores that do not go together.
    """
    kind = facts.fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise VocabularyError(
            f"{name} has a tokenizer of kind {kind!r}, which we cannot build; "
            "use a model with a byte-level or SentencePiece BPE tokenizer"
        )
    byte_level = kind == "gpt2"
    if byte_level and facts.pre_tokenizer not in _SPLITTINGS:
        raise VocabularyError(
            f"{name} splits text as {facts.pre_tokenizer!r} does, which we do not know; use another model, or this "
            "one's checkpoint with its tokenizer.json on the engine 'transformers'"
        )
    try:
        tokenizer = _byte_level(facts) if byte_level else _sentencepiece(facts)
        _add_specials(tokenizer, facts, byte_level)
    except Exception as error:  # the library's own has no class
        raise DamagedFileError(
            f"the tokenizer of {name} does not hold together ({error}); fetch or export the file again"
        ) from error
    return tokenizer


def _add_specials(tokenizer: Tokenizer, facts: Gguf, byte_level: bool) -> None:
    known = tokenizer.get_vocab()
    added = [
        AddedToken(token, normalized=False, special=type == _CONTROL)
        for token, type in zip(facts.tokens, facts.token_types, strict=True)
        # A control token outside the byte alphabet is mislabelled; it would come as a new id behind the last.
        if type in (_CONTROL, _USER_DEFINED) and token in known
        if not (byte_level and type == _CONTROL and token != _byte_spelled(token))
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    if facts.bos is not None and facts.add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[facts.bos, "$A"], special_tokens=[(facts.bos, facts.tokens.index(facts.bos))]
        )


def _byte_level(facts: Gguf) -> Tokenizer:
    splitting = _SPLITTINGS[facts.pre_tokenizer]
    vocab = {
        _byte_spelled(token): id
        for id, token in enumerate(facts.tokens)
        # Rows that only pad the embedding ("[PAD151665]") are no text, and upstream's vocabulary has no names for
        # them; left in, their names would pass for bytes.
        if not (facts.token_types[id] == _UNUSED and token.startswith("[PAD"))
    }
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_listed_merges(facts), ignore_merges=splitting.whole_words)
    )
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(expression), "isolated") for expression in splitting.expressions]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.expressions))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC() if splitting.nfc else None
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_spelled(token: str) -> str:
    """The token in the alphabet of bytes; some files spell added tokens as text."""
    if all(char in _BYTES for char in token):
        return token
    return "".join(CHAR_OF[byte] for byte in token.encode())


_BYTES = frozenset(CHAR_OF.values())


def _sentencepiece(facts: Gguf) -> Tokenizer:
    gemma = facts.architecture.startswith("gemma")
    # Gemma's files spell its tokens of several spaces with spaces, and its merges go by position, not by score.
    tokens = [
        _METASPACE * len(token) if gemma and token and not token.strip(" ") else token
        for token in facts.tokens
    ]
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = _listed_merges(facts) or _implied_merges(
        vocab, [-id for id in range(len(tokens))] if gemma else facts.fields["tokenizer.ggml.scores"]
    )
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=facts.unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()
    ]  # fmt: skip
    space_first = not gemma and facts.fields.get("tokenizer.ggml.add_space_prefix", True)
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", _METASPACE)
    else:
        scheme = "first" if space_first else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_METASPACE, prepend_scheme=scheme, split=False)
    if space_first:
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _listed_merges(facts: Gguf) -> list[tuple[str, str]]:
    merges: list[str] = facts.fields.get("tokenizer.ggml.merges", [])
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _implied_merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best first: SentencePiece keeps scores, not merges."""
    merges = [
        (score, i, token)
        for token, score in zip(vocab, scores, strict=True)
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    merges.sort(key=lambda merge: (merge[0], merge[1], len(merge[2]) - merge[1]), reverse=True)
    return [(token[:i], token[i:]) for _, i, token in merges]
