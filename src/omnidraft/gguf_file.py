"""A GGUF file's header: what the file says of itself, read in a fraction of a second.

The `gguf` package wraps every one of half a million strings in an array of its own, which takes ten seconds and more.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnidraft.errors import DamagedFileError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The format's numbers for types of values: struct's letters for them, and the two that are not of one size.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# A chat model ends its turn with one of these; one that was trained on plain text as well may end with
# <|endoftext|>. A GGUF names a single EOS where the upstream generation_config lists several.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "<|end|>")
# Where the file is silent: SentencePiece begins with a BOS, and so does byte-level BPE of these families.
_BOS_FIRST = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
)


@dataclass(frozen=True)
class Gguf:
    """What a GGUF file says of itself. `fields` is all of it, under the format's own names."""

    parameters: int
    name: str
    licence: str
    context_length: int
    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    bos: str | None
    eos: str | None
    unknown: str | None
    padding: str | None
    add_bos: bool
    chat_template: str | None
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def architecture(self) -> str:
        """The family of models, by llama.cpp's name for it."""
        return str(self.fields["general.architecture"])

    def of_architecture(self, name: str, default: Any = None) -> Any:
        """A field of the model's architecture: `attention.head_count`, say, of `llama.attention.head_count`."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    @property
    def ends(self) -> list[int]:
        """Ids that end an answer, the file's own EOS first."""
        names = dict.fromkeys([self.eos, *(_ENDS if self.chat_template else ())])
        return [self.tokens.index(name) for name in names if name in self.tokens]


def is_gguf(file: Path) -> bool:
    """Whether the file begins as a GGUF file does."""
    with file.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def read_gguf(file: Path) -> Gguf:
    """Read a GGUF file's header.

    Raises:
        DamagedFileError: it is no GGUF file, is cut short, or holds no tokenizer.
    """
    try:
        fields, parameters = _read_header(file)
        architecture = fields["general.architecture"]
        tokens: list[str] = fields["tokenizer.ggml.tokens"]
        context_length = int(fields[f"{architecture}.context_length"])
    except Exception as error:  # what is raised depends on the byte that is wrong
        raise DamagedFileError(
            f"{file} cannot be read as a GGUF model with a tokenizer ({error}); fetch or export it again"
        ) from error

    def token(role: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[index] if index is not None and index < len(tokens) else None

    pre_tokenizer = fields.get("tokenizer.ggml.pre", "default")
    begins_with_bos = fields.get("tokenizer.ggml.model") == "llama" or pre_tokenizer in _BOS_FIRST
    return Gguf(
        parameters=parameters,
        name=fields.get("general.name", file.stem),
        licence=fields.get("general.license", "unknown"),
        context_length=context_length,
        pre_tokenizer=pre_tokenizer,
        tokens=tokens,
        token_types=fields.get("tokenizer.ggml.token_type", [1] * len(tokens)),
        bos=token("bos"),
        eos=token("eos"),
        unknown=token("unknown"),
        padding=token("padding"),
        add_bos=fields.get("tokenizer.ggml.add_bos_token", begins_with_bos),
        chat_template=fields.get("tokenizer.chat_template"),
        fields=fields,
    )


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(fields, number of parameters)"""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        cursor = _Cursor(data, at=len(_MAGIC))
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, known are {_VERSIONS}")
        tensors, count = cursor.scalar("Q"), cursor.scalar("Q")
        fields = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(count)}
        parameters, last = 0, 0
        for _ in range(tensors):
            cursor.string()  # its name
            parameters += math.prod(cursor.scalars("Q", cursor.scalar("I")))
            cursor.scalar("I")  # its type
            last = max(last, cursor.scalar("Q"))
        if cursor.at + last > len(data):
            raise ValueError("it is cut short")
        return fields, parameters


class _Cursor:
    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at

    def scalar(self, letter: str) -> Any:
        return self.scalars(letter, 1)[0]

    def scalars(self, letter: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{letter}", self._data, self.at)
        self.at += struct.calcsize(f"<{count}{letter}")
        return values

    def string(self) -> str:
        start = self.at + 8
        end = start + int.from_bytes(self._data[self.at : start], "little")
        if end > len(self._data):
            raise ValueError("it is cut short")
        self.at = end
        return self._data[start:end].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            return list(self.scalars(_SCALARS[inner], count))
        return [self.value(inner) for _ in range(count)]
