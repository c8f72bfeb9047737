"""What comes back: an answer, whole or as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from omnidraft.decode import Chunk
from omnidraft.stats import Stats
from omnidraft.types import Step


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its text, the target's tokens, why it ended ("stop" or "length"), and what it took."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    stats: Stats

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """An answer's text as it comes. `chunks()` gives it with its Steps; `tokens`, `stats` and `finish_reason`
    grow with it. It can be abandoned at any time. One thread reads it."""

    def __init__(
        self, chunks: Iterator[Chunk], ends: Sequence[int], limit: int, count: Callable[[Step], None]
    ) -> None:
        self._chunks = chunks
        self._ends = ends
        self._limit = limit
        self._count = count
        self.tokens: list[int] = []
        self.stats = Stats()
        self._stopped = False

    def chunks(self) -> Iterator[Chunk]:
        """The rest of the answer, step by step."""
        for chunk in self._chunks:
            if chunk.step:
                self.tokens += chunk.step.tokens
                self.stats.add(chunk.step)
                self._count(chunk.step)
            self._stopped |= chunk.stopped
            yield chunk

    def __next__(self) -> str:
        for chunk in self.chunks():
            if chunk.text:
                return chunk.text
        raise StopIteration

    @property
    def complete(self) -> bool:
        """Whether no more tokens come."""
        return self._stopped or len(self.tokens) >= self._limit or self._ended

    @property
    def _ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self._ends

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Why a finished answer ended."""
        return "stop" if self._stopped or self._ended or len(self.tokens) < self._limit else "length"
