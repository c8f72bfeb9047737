"""Tokens per step of `text` against `direct`: paired by prompt, with bootstrap confidence intervals.

Reads the JSON of `omnidraft bench --methods direct,text` and prints one row per task and k.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def paired_ratio(
    record: dict, task: str, resamples: int = 10_000
) -> tuple[int, float, float, float, float, float]:
    """Prompts, tokens per step of direct and of text, and their ratio with its 95 % interval over prompts."""
    counts = {
        method: np.array(
            [
                (answer["tokens"], answer["steps"])
                for answer in sorted(record["answers"], key=lambda answer: answer["prompt"])
                if (answer["task"], answer["method"]) == (task, method)
            ]
        )
        for method in ("direct", "text")
    }

    def rate(method: str, rows: np.ndarray) -> np.ndarray:
        tokens, steps = np.moveaxis(counts[method][rows].sum(axis=-2), -1, 0)
        return tokens / steps

    prompts = len(counts["text"])
    draws = np.random.default_rng(0).integers(prompts, size=(resamples, prompts))
    low, high = np.quantile(rate("text", draws) / rate("direct", draws), [0.025, 0.975])
    everything = np.arange(prompts)
    direct, text = float(rate("direct", everything)), float(rate("text", everything))
    return prompts, direct, text, text / direct, float(low), float(high)


if __name__ == "__main__":
    print(
        "| task | k | prompts | direct | text | text / direct | 95 % interval |\n|---|---|---|---|---|---|---|"
    )
    for file in sys.argv[1:]:
        record = json.loads(Path(file).read_text())
        for task in dict.fromkeys(row["task"] for row in record["rows"]):
            prompts, direct, text, ratio, low, high = paired_ratio(record, task)
            k = record["provenance"]["k"]
            print(
                f"| {task} | {k} | {prompts} | {direct:.2f} | {text:.2f} | {ratio:.3f} | {low:.3f} to {high:.3f} |"
            )
