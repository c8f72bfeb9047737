"""Vocabularies as bytes: what each token id stands for, and how two vocabularies meet."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from omnidraft.errors import VocabularyError

_INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")  # what the surrogateescape handler leaves of invalid bytes
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "\u2581"
_BATCH = 10_000  # texts encoded at once: bounds the memory of their encodings


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


_BYTE_OF = _byte_alphabet()
_CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}


class Vocab:
    """A table from token id to the exact bytes it stands for, and the encoder that belongs to it.

    `pieces[id]` is `b""` for special tokens and for ids that only pad the model's logits.
    `specials` maps a special token's text to its id; `bos` is None when the family starts without one;
    `eos` lists the ids that end an answer, the tokenizer's own first.

    Raises:
        VocabularyError: the tokenizer is of a family whose tokens do not spell bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        width: int | None = None,
        bos: int | None = None,
        eos: Iterable[int] = (),
    ) -> None:
        spec = json.loads(tokenizer.to_str())
        self._byte_level = "ByteLevel" in _types(spec["decoder"])
        if not self._byte_level and not ({"ByteFallback", "Metaspace"} & _types(spec["decoder"])):
            raise VocabularyError(
                f"a {spec['model'].get('type')} tokenizer's tokens do not spell bytes; "
                "use a model with a byte-level or SentencePiece tokenizer"
            )
        self._encoder = _bytes_preserving(spec)
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.width = max(width or 0, self.size)
        self.bos = bos
        self.eos = tuple(dict.fromkeys(eos))
        added = {token["id"]: token for token in spec["added_tokens"]}
        self.specials = {token["content"]: id for id, token in added.items() if token["special"]}
        pieces = [b""] * self.width
        for text, id in tokenizer.get_vocab(with_added_tokens=True).items():
            if id not in added:
                pieces[id] = self._piece(text)
            elif not added[id]["special"]:
                pieces[id] = text.replace(_METASPACE, " ").encode() if not self._byte_level else text.encode()
        self.pieces = tuple(pieces)

    def _piece(self, text: str) -> bytes:
        if self._byte_level:
            if all(char in _BYTE_OF for char in text):
                return bytes(_BYTE_OF[char] for char in text)
            return text.encode()
        if match := _BYTE_FALLBACK.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace(_METASPACE, " ").encode()

    @cached_property
    def special_text(self) -> dict[int, str]:
        """id -> text of each special token."""
        return {id: text for text, id in self.specials.items()}

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """bytes -> the canonical id that stands for them: the one the encoder uses, else the lowest."""
        ids: dict[bytes, int] = {}
        duplicates: set[bytes] = set()
        for id, piece in enumerate(self.pieces):
            if piece and ids.setdefault(piece, id) != id:
                duplicates.add(piece)
        for piece in duplicates:
            encoding = self.encode_bytes(piece)
            if len(encoding) == 1 and self.pieces[encoding[0]] == piece:
                ids[piece] = encoding[0]
        return ids

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over pieces and specials: equal for equal tables, however the tokenizers are called."""
        digest = hashlib.sha256()
        for piece in self.pieces[: self.size]:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        digest.update(json.dumps(sorted(self.specials.items())).encode())
        return digest.hexdigest()

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes the tokens stand for; special and padded ids stand for none."""
        return b"".join([self.pieces[token] for token in tokens])

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids for `data`, without special tokens; incomplete UTF-8 is spelled in byte tokens.

        Bytes the vocabulary has no token for are missing from the result, so `decode` of it can differ from
        `data`; callers that need the same bytes compare.
        """
        tokens: list[int] = []
        try:
            parts = [data.decode()]
        except UnicodeDecodeError:
            parts = _INVALID_UTF8.split(data.decode("utf-8", "surrogateescape"))
        for text, invalid in zip(parts[::2], [*parts[1::2], ""], strict=True):
            if text:
                tokens += self._encoder.encode(text, add_special_tokens=False).ids
            if invalid:
                tokens += self._spell(invalid.encode("utf-8", "surrogateescape"))
        # An unknown token or another special one stands for bytes that were dropped.
        return [token for token in tokens if self.pieces[token]]

    def encode_many(self, pieces: Sequence[bytes]) -> list[list[int]]:
        """`encode_bytes` of each, on all cores."""
        encoded: list[list[int]] = []
        for start in range(0, len(pieces), _BATCH):
            batch = pieces[start : start + _BATCH]
            texts = [piece.decode("utf-8", "replace") for piece in batch]
            for piece, text, encoding in zip(
                batch, texts, self._encoder.encode_batch_fast(texts, add_special_tokens=False), strict=True
            ):
                valid = "\ufffd" not in text
                encoded.append(
                    [id for id in encoding.ids if self.pieces[id]] if valid else self.encode_bytes(piece)
                )
        return encoded

    def _spell(self, data: bytes) -> list[int]:
        if self._byte_level:
            known = "".join(_CHAR_OF[byte] for byte in data if self._byte_tokens[byte] is not None)
            return [token.id for token in self._encoder.model.tokenize(known)] if known else []
        return [token for byte in data if (token := self._byte_tokens[byte]) is not None]

    @cached_property
    def _byte_tokens(self) -> list[int | None]:
        tokens: list[int | None] = [None] * 256
        for id, piece in enumerate(self.pieces):
            if len(piece) == 1:
                tokens[piece[0]] = id
        return tokens


def _types(node: Any) -> set[str]:
    """The `type` of a component of a tokenizer.json and of everything inside it."""
    if isinstance(node, dict):
        inner = set[str]().union(*(_types(value) for value in node.values()))
        return inner | ({node["type"]} if isinstance(node.get("type"), str) else set())
    if isinstance(node, list):
        return set[str]().union(*(_types(value) for value in node))
    return set()


def _bytes_preserving(spec: dict[str, Any]) -> Tokenizer:
    """The same tokenizer, changed so that an encoding's pieces always spell the text that went in.

    No BOS, no space put in front, no Unicode normalisation, no special token read out of plain text.
    """
    spec = json.loads(json.dumps(spec))
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None

    def kept(normalizer: Any) -> Any:
        if normalizer is None or normalizer["type"] == "Sequence":
            inner = [n for n in map(kept, (normalizer or {}).get("normalizers", [])) if n]
            return {"type": "Sequence", "normalizers": inner} if inner else None
        return normalizer if normalizer["type"] == "Replace" and normalizer["content"] == _METASPACE else None

    def no_prefix(node: Any) -> None:
        if isinstance(node, dict):
            if "add_prefix_space" in node:
                node["add_prefix_space"] = False
            if "prepend_scheme" in node:
                node["prepend_scheme"] = "never"
            for value in node.values():
                no_prefix(value)
        elif isinstance(node, list):
            for value in node:
                no_prefix(value)

    spec["normalizer"] = kept(spec["normalizer"])
    no_prefix(spec["pre_tokenizer"])
    encoder = Tokenizer.from_str(json.dumps(spec))
    encoder.encode_special_tokens = True
    return encoder


@dataclass(frozen=True)
class Alignment:
    """How a drafter's vocabulary meets a target's: by bytes for text, by role and text for special tokens."""

    draft: Vocab
    target: Vocab
    draft_to_target: list[int] = field(init=False, repr=False)  # [V_draft], -1 where no token has these bytes
    special_draft_to_target: dict[int, int] = field(init=False, repr=False)
    special_target_to_draft: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        direct = [self.target.id_of.get(piece, -1) if piece else -1 for piece in self.draft.pieces]
        forward = _match_specials(self.draft, self.target)
        backward = _match_specials(self.target, self.draft)
        for draft_id, target_id in forward.items():
            direct[draft_id] = target_id
        object.__setattr__(self, "draft_to_target", direct)
        object.__setattr__(self, "special_draft_to_target", forward)
        object.__setattr__(self, "special_target_to_draft", backward)

    @cached_property
    def same(self) -> bool:
        """Whether the two tables are equal: then tokens need no translation, whatever the tokenizers' names."""
        return self.draft.fingerprint == self.target.fingerprint

    @property
    def shared(self) -> int:
        """How many of the drafter's tokens stand for bytes that are one token of the target."""
        special = self.special_draft_to_target
        return sum(id >= 0 for draft, id in enumerate(self.draft_to_target) if draft not in special)


def _match_specials(source: Vocab, other: Vocab) -> dict[int, int]:
    matched = {id: other.specials[text] for text, id in source.specials.items() if text in other.specials}
    # By role: an end of answer without a namesake still means the end of the answer.
    if other.eos:
        for id in source.eos:
            matched.setdefault(id, other.eos[0])
    if source.bos is not None and other.bos is not None:
        matched.setdefault(source.bos, other.bos)
    return matched


def runs(vocab: Vocab, tokens: Sequence[int]) -> Iterable[bytes | int]:
    """The tokens as alternating stretches of text (bytes) and single special tokens (their ids)."""
    text: list[int] = []
    for token in tokens:
        if token in vocab.special_text:
            if text:
                yield vocab.decode(text)
                text = []
            yield token
        else:
            text.append(token)
    if text:
        yield vocab.decode(text)
