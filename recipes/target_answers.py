"""A target's greedy answers to training prompts, for the text of omnidraft-nano: many at once, through OpenVINO int8.

    python recipes/target_answers.py --data DIR --skip 160 --minutes 30 --out answers.jsonl

Prompts of GSM8K's and MBPP's training splits in turns, `--skip` of each left out (those that `omnidraft experiment`
records). Goes on where an earlier run was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op

from omnidraft import load_model
from omnidraft.backends.openvino import SETTINGS, OpenVinoModel
from omnidraft.tasks import load_task

_ALL = 10**6


class Batches:
    """Greedy decoding of several prompts at once, padded on the left."""

    def __init__(self, model: OpenVinoModel) -> None:
        graph = ov.Core().read_model(model.graph)
        logits = graph.outputs[0].node.input_value(0).get_node()
        last = op.gather(
            logits.input_value(0), op.constant(np.array([-1], np.int64)), op.constant(np.int64(1))
        )
        logits.input(0).replace_source_output(last.output(0))
        self._request = ov.Core().compile_model(graph, "CPU", dict(SETTINGS)).create_infer_request()
        self._ends = list(model.vocab.eos)

    def answers(self, prompts: Sequence[Sequence[int]], most: int) -> NDArray[np.int64]:
        """At most `most` tokens behind each prompt, whatever follows its end included. [n, <= most]"""
        self._request.reset_state()
        longest = max(map(len, prompts))
        tokens = np.array([[0] * (longest - len(one)) + list(one) for one in prompts], np.int64)
        mask = np.array([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], np.int64)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        written: list[NDArray[np.int64]] = []
        ended = np.zeros(len(prompts), bool)
        while len(written) < most and not ended.all():
            rows = self._request.infer(
                {
                    "input_ids": tokens,
                    "attention_mask": mask,
                    "position_ids": positions,
                    "beam_idx": np.arange(len(prompts), dtype=np.int32),
                }
            )[0]
            new = rows[:, -1].argmax(-1)
            written.append(new)
            ended |= np.isin(new, self._ends)
            tokens, positions = new[:, None], positions[:, -1:] + 1
            mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
        return np.stack(written, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="qwen2.5-coder-0.5b")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = load_model(given.target, engine="openvino", precision="int8")
    assert isinstance(model, OpenVinoModel)
    until = monotonic() + 60 * given.minutes
    tasks = [load_task(task, given.data, _ALL, split="train")[given.skip :] for task in ("gsm8k", "mbpp")]
    prompts = [one for one in chain.from_iterable(zip_longest(*tasks)) if one is not None]
    done = given.out.read_text(encoding="utf-8").count("\n") if given.out.is_file() else 0
    batches, ends = Batches(model), model.vocab.eos
    with given.out.open("a", encoding="utf-8") as out:
        for at in range(done, len(prompts), given.batch):
            if monotonic() > until:
                break
            part = prompts[at : at + given.batch]
            chats = [model.chat([{"role": "user", "content": one}]) for one in part]
            for prompt, tokens in zip(part, batches.answers(chats, given.tokens).tolist(), strict=True):
                end = next((i for i, token in enumerate(tokens) if token in ends), None)
                answer: dict[str, Any] = {
                    "prompt": prompt,
                    "answer": model.tokenizer.decode(tokens[:end]),
                    "ended": end is not None,
                    "by": given.target,
                }
                out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
