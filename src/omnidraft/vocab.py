"""Vocabularies as bytes: what each token id stands for, and how two vocabularies meet."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tokenizers import Tokenizer

from omnidraft.pieces import (
    CHAR_OF,
    METASPACE,
    Opening,
    bytes_preserving,
    continuations,
    normaliser,
    opening,
    pieces_of,
    spec_of,
    types,
)

_INVALID_UTF8 = "\udc80-\udcff"  # what the surrogateescape handler leaves of invalid bytes
_BATCH = 10_000  # texts encoded at once: bounds the memory of their encodings


class Vocab:
    """A table from token id to the exact bytes it stands for, and the encoder that belongs to it.

    `pieces[id]` is `b""` for special tokens and for ids that only pad the model's logits.
    `specials` maps a special token's text to its id; `bos` is None when the family starts without one;
    `eos` lists the ids that end an answer, the tokenizer's own first.

    Raises:
        VocabularyError: the tokenizer is of a family whose tokens do not spell bytes.
    """

    _opening: Opening = "never"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        width: int | None = None,
        bos: int | None = None,
        eos: Iterable[int] = (),
    ) -> None:
        ids = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in types(spec_of(tokenizer.decoder))
        pieces = pieces_of(tokenizer, {text: id for text, id in ids.items() if id not in added})
        self._encoder = bytes_preserving(tokenizer)
        self._continuations = continuations(tokenizer)
        self._normaliser = normaliser(tokenizer)
        self._opening = opening(tokenizer)
        # U+2581 means a space in these families' tokens; where a text has it, it is spelled in bytes.
        special_cases = (
            _INVALID_UTF8 if self._byte_level or self._continuations else _INVALID_UTF8 + METASPACE
        )
        self._not_text = re.compile(f"([{special_cases}]+)")
        self.size = 1 + max(ids.values())
        self.width = max(width or 0, self.size)
        self.bos = bos
        self.eos = tuple(dict.fromkeys(eos))
        self.specials = {token.content: id for id, token in added.items() if token.special}
        for id, token in added.items():
            if not token.special:
                text = token.content if self._byte_level else token.content.replace(METASPACE, " ")
                pieces[id] = text.encode()
        self.pieces = tuple(pieces.get(id, b"") for id in range(self.width))

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

        `decode` of them differs from `data` where the vocabulary has no tokens for it: bytes are missing, or the
        text is normalised as the tokenizer does; callers that need the same bytes compare.
        """
        tokens = self._spell(data)
        if self._normaliser and not self._complete and self.decode(tokens) != data:
            normalised = self._normaliser.normalize_str(data.decode("utf-8", "ignore"))
            return self._spell(normalised.encode())
        return tokens

    def encode_many(self, pieces: Sequence[bytes]) -> list[list[int]]:
        """`encode_bytes` of each, on all cores."""
        encoded: list[list[int]] = []
        for start in range(0, len(pieces), _BATCH):
            batch = pieces[start : start + _BATCH]
            texts = [piece.decode("utf-8", "replace") for piece in batch]
            for piece, text, encoding in zip(
                batch, texts, self._encoder.encode_batch_fast(texts, add_special_tokens=False), strict=True
            ):
                plain = "\ufffd" not in text and not (self._continuations or self._not_text.search(text))
                tokens = [id for id in encoding.ids if self.pieces[id]]
                same = plain and (self._normaliser is None or self._complete or self.decode(tokens) == piece)
                encoded.append(tokens if same else self.encode_bytes(piece))
        return encoded

    def opened(self, context: Sequence[int], data: bytes) -> bytes:
        """`data` as it begins behind `context`: with the space that the tokenizer puts before a text."""
        begins = not context or context[-1] in self.special_text
        if self._opening == "first":
            begins = len(context) < 2 and list(context) in ([], [self.bos])
        if self._opening == "never" or not begins or (self._byte_level and data[:1].isspace()):
            return data
        return b" " + data

    def _spell(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        parts = self._not_text.split(data.decode("utf-8", "surrogateescape"))
        for text, other in zip(parts[::2], [*parts[1::2], ""], strict=True):
            if text:
                tokens += self._spell_text(text)
            if other:
                tokens += self._spell_in_bytes(other.encode("utf-8", "surrogateescape"))
        # An unknown token or another special one stands for bytes that were dropped.
        return [token for token in tokens if self.pieces[token]]

    def _spell_text(self, text: str) -> list[int]:
        encoding = self._encoder.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._continuations and text[0].isalnum() and encoding.word_ids[:1] == [0]:
            # No space before it: the rest of a word.
            first = encoding.word_ids.count(0)
            word = self._normalised(text[: encoding.offsets[first - 1][1]])
            rest = [token.id for token in self._continuations.tokenize(word)]
            if all(self.pieces[token] for token in rest):
                return rest + ids[first:]
        return ids

    def _normalised(self, text: str) -> str:
        normalizer = self._encoder.normalizer
        normalised: str = normalizer.normalize_str(text) if normalizer else text
        return normalised

    def _spell_in_bytes(self, data: bytes) -> list[int]:
        if self._byte_level:
            known = "".join(CHAR_OF[byte] for byte in data if self._byte_tokens[byte] is not None)
            return [token.id for token in self._encoder.model.tokenize(known)] if known else []
        return [token for byte in data if (token := self._byte_tokens[byte]) is not None]

    @cached_property
    def _byte_tokens(self) -> list[int | None]:
        tokens: list[int | None] = [None] * 256
        for id, piece in enumerate(self.pieces):
            if len(piece) == 1:
                tokens[piece[0]] = id
        return tokens

    @cached_property
    def _complete(self) -> bool:
        """Whether any bytes can be spelled."""
        return None not in self._byte_tokens


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
