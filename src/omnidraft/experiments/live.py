"""Decoding for real: target and drafter with their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from omnidraft.bench import method_options
from omnidraft.engine import OmniDraft
from omnidraft.experiments.experiment import Measured
from omnidraft.experiments.replay import counted, counts_of


def answer(
    model: OmniDraft, prompt: str, method: str, **options: Any
) -> tuple[tuple[int, ...], str, Measured]:
    """One answer by a method, named as for `omnidraft bench`: its tokens, its text, what it took and its seconds."""
    stream = model.stream(prompt, **method_options(method), **options)
    more = Counter[str]()
    text = ""
    for chunk in stream.chunks():
        text += chunk.text
        if chunk.step:
            more += counts_of(chunk.step)
    return tuple(stream.tokens), text, counted(stream.stats, more) | {"seconds": stream.stats.seconds}


def answers(
    model: OmniDraft, prompts: list[str], method: str, **options: Any
) -> Iterator[tuple[tuple[int, ...], str, Measured]]:
    """Each prompt's, from the same state but for the n-grams met; prompt i is drawn with seed i."""
    for i, prompt in enumerate(prompts):
        yield answer(model, prompt, method, seed=i, **options)
