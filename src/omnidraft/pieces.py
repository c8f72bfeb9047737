"""What a tokenizer's tokens stand for, and its encoder without all that changes bytes.

The family is read from the tokenizer's own decoder, and so is the meaning of a token: `pieces[id]` is what the
decoder adds to a text that has begun. Three ways of writing bytes in tokens are known:

- byte-level (GPT-2's alphabet; what tiktoken and Tekken files become): one character for each byte;
- SentencePiece, BPE and Unigram: U+2581 is a space, with byte fallback `<0x0A>` is one byte;
- WordPiece: `##ing` is `ing`, any other token a space and its text, but for the punctuation that the decoder
  moves to the word before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, models, normalizers

from omnidraft.errors import VocabularyError

METASPACE = "\u2581"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A text that has begun: behind it a decoder strips no space.
_BEGUN = "x"
# Pre-tokenizers that throw away the white space they split at.
_DROPPING = ("Whitespace", "WhitespaceSplit", "CharDelimiterSplit")

Spec = dict[str, Any]  # a component as a tokenizer.json has it
Opening = Literal["never", "first", "always"]


def _byte_alphabet() -> dict[str, int]:
    """The GPT-2 alphabet: one printable character for each of the 256 bytes."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_OF = _byte_alphabet()
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}


def types(node: Any) -> set[str]:
    """The `type` of a component of a tokenizer.json and of everything inside it."""
    if isinstance(node, dict):
        inner = set[str]().union(*(types(value) for value in node.values()))
        return inner | ({node["type"]} if isinstance(node.get("type"), str) else set())
    if isinstance(node, list):
        return set[str]().union(*(types(value) for value in node))
    return set()


def spec_of(component: Any) -> Spec | None:
    """A tokenizer's component as JSON. Its pickled state is that, and unlike the whole tokenizer's it is small."""
    return None if component is None else json.loads(component.__getstate__())


def pieces_of(tokenizer: Tokenizer, texts: Mapping[str, int]) -> dict[int, bytes]:
    """id -> the bytes that a token of the model stands for, for each of `texts`.

    Raises:
        VocabularyError: the decoder does not join its tokens' texts, so a token stands for no bytes of its own.
    """
    parts = types(spec_of(tokenizer.decoder))
    piece = _rule(tokenizer, parts)
    pieces = {id: piece(text) for text, id in texts.items()}
    # Byte tokens are decoded run by run, invalid ones to a character of the decoder's choice.
    joined = [text for text in texts if not ("ByteFallback" in parts and _BYTE_FALLBACK.fullmatch(text))]
    expected = b"".join([pieces[texts[text]] for text in joined]).decode("utf-8", "replace")
    if tokenizer.decoder is None or tokenizer.decoder.decode([_BEGUN, *joined]) != _BEGUN + expected:
        raise VocabularyError(
            f"this {type(tokenizer.model).__name__} tokenizer's tokens do not spell bytes "
            f"(its decoder is {', '.join(sorted(parts - {'Sequence'})) or 'missing'}); "
            "use a model with a byte-level, SentencePiece or WordPiece tokenizer"
        )
    return pieces


def _rule(tokenizer: Tokenizer, parts: set[str]) -> Callable[[str], bytes]:
    def byte_level(text: str) -> bytes:
        try:
            return bytes(map(BYTE_OF.__getitem__, text))
        except KeyError:
            return text.encode()

    def word_piece(text: str) -> bytes:
        decoded: str = tokenizer.decoder.decode([_BEGUN, text])
        return decoded[len(_BEGUN) :].encode()

    def sentence_piece(text: str) -> bytes:
        return text.replace(METASPACE, " ").encode()

    def byte_fallback(text: str) -> bytes:
        if match := _BYTE_FALLBACK.fullmatch(text):
            return bytes([int(match[1], 16)])
        return sentence_piece(text)

    if "ByteLevel" in parts:
        return byte_level
    if "WordPiece" in parts:
        return word_piece
    return byte_fallback if "ByteFallback" in parts else sentence_piece


def bytes_preserving(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, changed so that an encoding's pieces spell the text that went in, where they can.

    No BOS, no space put in front, no Unicode normalisation, no white space dropped, no special token read out of
    plain text. WordPiece keeps its normalisation: its words have no other spelling.
    """
    added = tokenizer.get_added_tokens_decoder()
    if isinstance(tokenizer.model, models.Unigram):
        # Its special tokens are pieces like any other; under these names no text leads to them.
        names = {id: f"\uffff{id}" for id, token in added.items() if token.special}
        state: Spec = json.loads(tokenizer.model.__getstate__())
        state["vocab"] = [[names.get(id, text), score] for id, (text, score) in enumerate(state["vocab"])]
        encoder = _assembled(model=state)
    else:
        names = {}
        encoder = Tokenizer(tokenizer.model)  # shared: it is large, and never changes
    for special, tokens in groupby(sorted(added.items()), key=lambda item: item[1].special):
        add = encoder.add_special_tokens if special else encoder.add_tokens
        add(
            [
                # Neither `lstrip` nor `rstrip`: white space at their sides would go with them.
                AddedToken(
                    names.get(id, token.content),
                    single_word=token.single_word,
                    normalized=token.normalized,
                    special=special,
                )
                for id, token in tokens
            ]
        )
    if isinstance(tokenizer.model, models.WordPiece):
        encoder.normalizer, encoder.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    else:
        parts = _assembled(
            normalizer=_select(spec_of(tokenizer.normalizer), _writes_metaspace),
            pre_tokenizer=_all_kept(spec_of(tokenizer.pre_tokenizer)),
        )
        encoder.normalizer, encoder.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    encoder.encode_special_tokens = True
    return encoder


def normaliser(tokenizer: Tokenizer) -> normalizers.Normalizer | None:
    """What the tokenizer does to characters before it looks for tokens, and `bytes_preserving` leaves out."""
    if isinstance(tokenizer.model, models.WordPiece):
        return None
    kept = _select(
        spec_of(tokenizer.normalizer),
        lambda part: part["type"] not in ("Prepend", "Strip") and not _writes_metaspace(part),
    )
    normalizer: normalizers.Normalizer | None = _assembled(normalizer=kept).normalizer
    return normalizer


def opening(tokenizer: Tokenizer) -> Opening:
    """Where the tokenizer puts a space before a text: nowhere, at the very beginning, behind special tokens too."""
    pre_tokenizer = spec_of(tokenizer.pre_tokenizer)
    schemes = set(_values(pre_tokenizer, "prepend_scheme"))
    if (
        isinstance(tokenizer.model, models.WordPiece)
        or "Prepend" in types(spec_of(tokenizer.normalizer))
        or "always" in schemes
        or True in _values(pre_tokenizer, "add_prefix_space")
    ):
        return "always"
    return "first" if "first" in schemes else "never"


def continuations(tokenizer: Tokenizer) -> models.WordPiece | None:
    """A WordPiece tokenizer's spelling of the rest of a word, by `##` tokens alone; None in other families."""
    model = tokenizer.model
    if not isinstance(model, models.WordPiece):
        return None
    prefix: str = model.continuing_subword_prefix
    ids = tokenizer.get_vocab(with_added_tokens=False)
    rest = {text[len(prefix) :]: id for text, id in ids.items() if text.startswith(prefix)}
    return models.WordPiece(
        vocab=rest | {model.unk_token: ids[model.unk_token]},
        unk_token=model.unk_token,
        max_input_chars_per_word=model.max_input_chars_per_word,
        continuing_subword_prefix="",
    )


def _assembled(**components: Spec | None) -> Tokenizer:
    """A tokenizer of these components, empty but for them."""
    return Tokenizer.from_str(json.dumps(json.loads(Tokenizer(models.BPE()).to_str()) | components))


def _writes_metaspace(part: Spec) -> bool:
    return bool(part["type"] == "Replace" and part["content"] == METASPACE)


def _select(part: Spec | None, keep: Callable[[Spec], bool]) -> Spec | None:
    """A normalizer or pre-tokenizer reduced to those of its parts that `keep` holds for."""
    if part is None:
        return None
    if part["type"] != "Sequence":
        return part if keep(part) else None
    name = "normalizers" if "normalizers" in part else "pretokenizers"
    inner = [kept for one in part[name] if (kept := _select(one, keep))]
    return {"type": "Sequence", name: inner} if inner else None


def _all_kept(pre_tokenizer: Spec | None) -> Spec | None:
    """A pre-tokenizer that puts no space in front, and keeps what it splits at."""
    kept = _select(pre_tokenizer, lambda part: part["type"] not in _DROPPING)
    if kept is None:
        return None
    parts = kept["pretokenizers"] if kept["type"] == "Sequence" else [kept]
    changes = {"add_prefix_space": False, "prepend_scheme": "never"}
    changed = [
        part
        | {name: value for name, value in changes.items() if name in part}
        | ({"behavior": "Isolated"} if part.get("behavior") == "Removed" else {})
        for part in parts
    ]
    return {"type": "Sequence", "pretokenizers": changed}


def _values(node: Any, name: str) -> list[Any]:
    """All values that go by a name inside a component."""
    if isinstance(node, dict):
        own = [node[name]] if name in node else []
        return own + [found for value in node.values() for found in _values(value, name)]
    return [found for value in node for found in _values(value, name)] if isinstance(node, list) else []
