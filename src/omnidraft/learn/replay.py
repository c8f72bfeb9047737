"""Traces kept for training: bounded in bytes, and as plain arrays for a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnidraft.learn.traces import Trace

Arrays = dict[str, NDArray[Any]]


class Replay:
    """The latest Traces; the oldest go when there are more bytes than `limit`."""

    def __init__(self, limit: int, traces: Iterable[Trace] = ()) -> None:
        """`limit`: bytes."""
        self.limit = limit
        self.nbytes = 0
        self._traces: deque[Trace] = deque()
        for trace in traces:
            self.add(trace)

    def add(self, trace: Trace) -> None:
        """Keep one more."""
        self._traces.append(trace)
        self.nbytes += trace.nbytes
        while self.nbytes > self.limit and len(self._traces) > 1:
            self.nbytes -= self._traces.popleft().nbytes

    def __iter__(self) -> Iterator[Trace]:
        return iter(self._traces)

    def __getitem__(self, i: int) -> Trace:
        return self._traces[i]

    def __len__(self) -> int:
        return len(self._traces)


def pack(traces: Iterable[Trace]) -> Arrays:
    """Traces as a few arrays: each field of all of them end to end, and its lengths."""
    kept = list(traces)
    arrays: Arrays = {}
    for field in fields(Trace):
        parts = [getattr(trace, field.name) for trace in kept]
        arrays[field.name] = np.concatenate(parts) if parts else np.empty(0, np.int32)
        arrays[f"{field.name}.lengths"] = np.array([len(part) for part in parts], np.int64)
    return arrays


def unpack(arrays: Mapping[str, NDArray[Any]]) -> list[Trace]:
    """The Traces of `pack`; copies, since a file's arrays cannot be written to and torch warns of such.

    Raises:
        KeyError, ValueError: not such arrays.
    """
    if "temperature" not in arrays:  # written before traces had it: nothing was drawn
        prompts = len(arrays["prompt"])
        arrays = {
            **arrays,
            "temperature": np.zeros(prompts, np.float32),
            "temperature.lengths": np.ones(prompts, int),
        }
    names = [field.name for field in fields(Trace)]
    columns = [
        np.split(np.array(arrays[name]), np.cumsum(arrays[f"{name}.lengths"])[:-1])
        if len(arrays[f"{name}.lengths"])
        else []
        for name in names
    ]
    return [Trace(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
