"""Training text: documents of files, and what a drafter is trained and judged on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnidraft.errors import OptionError

SUFFIXES = (".jsonl", ".txt", ".md", ".rst", ".py")
_JUDGES = 50  # one document of so many is held out


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a conversation whose last message is the assistant's."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    cut: bool = False  # the last message was cut off, so nothing ends there

    @property
    def held_out(self) -> bool:
        """Told from the contents, so that a document that comes twice is on one side."""
        contents = self.text or json.dumps(self.messages)
        return int.from_bytes(hashlib.sha256(contents.encode()).digest()[:4], "big") % _JUDGES == 0


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """The documents of files, and of folders' files that end in one of SUFFIXES.

    A line of a .jsonl file is a document: {"text": ...}, or {"messages": [{"role", "content"}, ...]} with
    "cut": true where the last message was not finished. Any other file is one document.

    Raises:
        OptionError: a file that is missing, unreadable or not of this form; no text at all.
    """
    documents: list[Document] = []
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        else:
            files = [path]
        for file in files:
            try:
                documents += _read(file)
            except (OSError, UnicodeDecodeError) as error:
                raise OptionError(f"{file} cannot be read as UTF-8 text ({error}); leave it out") from error
    if not documents:
        raise OptionError(
            f"no text in {', '.join(map(str, paths)) or 'nothing'}; name files or folders with text"
        )
    return documents


def _read(file: Path) -> Iterator[Document]:
    text = file.read_text(encoding="utf-8-sig")  # Windows' programs begin a file with a mark
    if file.suffix != ".jsonl":
        if text.strip():
            yield Document(text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = tuple(
                {"role": str(message["role"]), "content": str(message["content"])}
                for message in row.get("messages", ())
            )
            if messages and messages[-1]["role"] != "assistant":
                raise ValueError("the last message is not the assistant's")
            yield Document("" if messages else str(row["text"]), messages, bool(row.get("cut", False)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(
                f'{file}, line {number}, is neither {{"text": ...}} nor {{"messages": [...]}} ({error}); mend it'
            ) from error


def encode(tokenizer: Any, document: Document) -> tuple[list[int], int]:
    """A document as tokens of transformers' `tokenizer`, and where what a drafter would write of it begins."""
    end = [tokenizer.eos_token_id]
    if not document.messages:
        return [*_tokens(tokenizer, document.text), *end], 1
    before, answer = list(document.messages[:-1]), document.messages[-1]["content"]
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    else:
        prompt = "\n".join(message["content"] for message in before) + "\n"
    tokens = _tokens(tokenizer, prompt)
    return [*tokens, *_tokens(tokenizer, answer), *([] if document.cut else end)], len(tokens)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def pack(
    documents: Sequence[Sequence[int]], length: int, seed: int
) -> NDArray[np.int32]:  # [sequences, length]
    """Documents in random order, one after the other, cut into sequences; what is left at the end is dropped.

    Raises:
        OptionError: not even one sequence.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    stream = np.concatenate([np.asarray(documents[i], np.int32) for i in order] or [np.empty(0, np.int32)])
    count = len(stream) // length
    if not count:
        raise OptionError(
            f"the text has {len(stream)} tokens, fewer than one sequence of {length}; give more"
        )
    return stream[: count * length].reshape(count, length)
