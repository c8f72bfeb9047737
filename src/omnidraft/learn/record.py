"""A stream of a target's answers with what verification knows of them, on disk: recorded once, trained on often.

At temperature 0 an answer does not depend on the drafter, so learning from a recording is learning from the stream
itself: losses, rates, ranks and thresholds can be compared on it without the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from omnidraft.errors import OptionError
from omnidraft.learn.replay import pack, unpack
from omnidraft.learn.traces import Trace, Tracer
from omnidraft.ngrams import Trie
from omnidraft.session import Session
from omnidraft.types import Rows, as_tokens


@dataclass(frozen=True, slots=True)
class Recorded:
    """One prompt of a stream."""

    prompt: list[int]  # target's tokens
    answer: list[int]  # target's tokens
    trace: Trace | None


def record(
    model: Any,  # of the transformers engine
    trie: Trie,
    prompts: Sequence[Sequence[int]],  # target's tokens
    *,
    max_tokens: int,
    batch: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    on_batch: Callable[[int], None] = lambda done: None,
) -> list[Recorded]:
    """Answer prompts, `batch` at once, by transformers' own loop, sampled unless `temperature` is 0.

    `trie`: the pair's with every n-gram. Prompts of like length go together, so that little is padded.
    """
    torch.manual_seed(seed)
    how: dict[str, Any] = dict(do_sample=False)
    if temperature:
        how = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    recorded: dict[int, Recorded] = {}
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
        for i, one in zip(
            indices, _batch(model, trie, [prompts[i] for i in indices], max_tokens, how), strict=True
        ):
            recorded[i] = one
        on_batch(len(recorded))
    return [recorded[i] for i in range(len(prompts))]


@torch.inference_mode()
def _batch(
    model: Any, trie: Trie, prompts: list[Sequence[int]], max_tokens: int, how: dict[str, Any]
) -> list[Recorded]:
    width = max(map(len, prompts))
    eos = model.vocab.eos
    ids = torch.tensor([[eos[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    padding = list(range(model.vocab.size, model.vocab.width))
    output = model.module.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, pad_token_id=eos[0],
        eos_token_id=list(eos), suppress_tokens=padding, repetition_penalty=1.0,
        output_logits=True, return_dict_in_generate=True, **how,
    )  # fmt: skip
    recorded = []
    for i, prompt in enumerate(prompts):
        tracer = Tracer(trie, prompt)
        answer: list[int] = []
        for token, logits in zip(output.sequences[i, width:].tolist(), output.logits, strict=True):
            answer.append(token)
            tracer.see(token, logits[i].float().numpy())
            if token in eos:
                break
        recorded.append(Recorded(list(prompt), answer, tracer.trace()))
    return recorded


class RecordedSession(Session):
    """A target's session that knows only a recorded answer: the row at each position has it as its maximum."""

    def __init__(self, width: int) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self._text: list[int] = []
        # Handed out again and again: they differ in few entries.
        self._rows = np.full((65, width), -100, np.float32)
        self._raised: list[tuple[int, int]] = []

    def begin(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take another prompt and its answer."""
        self.truncate(0)
        self._text = [*prompt, *answer]

    def truncate(self, length: int) -> None:
        """See `omnidraft.session.Session`."""
        del self.tokens[length:]

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """Rows behind a token that is not the answer's are never looked at."""
        self.tokens.extend(tokens)
        for entry in self._raised:
            self._rows[entry] = -100
        end = len(self.tokens) + 1
        self._raised = list(enumerate(self._text[end - rows : end]))
        for entry in self._raised:
            self._rows[entry] = 0
        return self._rows[:rows]


def save(path: Path, stream: Sequence[Recorded], about: dict[str, Any]) -> None:
    """Write a stream; `about` is JSON that says what it is."""
    traced = [one.trace is not None for one in stream]
    arrays = pack(one.trace for one in stream if one.trace) | {"traced": np.array(traced)}
    for name in ("prompt", "answer"):
        parts = [np.array(getattr(one, name), np.int32) for one in stream]
        arrays[f"target.{name}"] = np.concatenate(parts)
        arrays[f"target.{name}.lengths"] = np.array([len(part) for part in parts], np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(arrays, part, metadata={"about": json.dumps(about)})
    part.replace(path)


def load(path: Path) -> tuple[list[Recorded], dict[str, Any]]:
    """A stream and what was said about it.

    Raises:
        OptionError: not such a file, or a damaged one.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})["about"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it has no __iter__
        sides = [
            np.split(arrays[name], np.cumsum(arrays[f"{name}.lengths"])[:-1])
            for name in ("target.prompt", "target.answer")
        ]
        traces = iter(unpack(arrays))
    except Exception as error:  # safetensors raises its own, which no module exports
        raise OptionError(f"{path} is not a recorded stream ({error}); record it again") from error
    return [
        Recorded(prompt.tolist(), answer.tolist(), next(traces) if traced else None)
        for prompt, answer, traced in zip(*sides, arrays["traced"], strict=True)
    ], about
