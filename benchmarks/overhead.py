"""What a step costs outside the models' passes: milliseconds by way of decoding, and by length of the context.

Real models, several short answers each way, medians and means over steps; the first answer of each way warms up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer

from omnidraft import OmniDraft, load
from omnidraft.demo import PROMPTS
from omnidraft.provenance import provenance
from omnidraft.types import Step

WAYS: dict[str, dict[str, Any]] = {
    "text, greedy": {"method": "text"},
    "text, temperature 1": {"method": "text", "temperature": 1.0, "seed": 1},
    "text, temperature 0.7, top-p 0.9": {"method": "text", "temperature": 0.7, "top_p": 0.9, "seed": 1},
    "prefill and compare, greedy": {"method": "prefill"},
    "prefill and trie, temperature 1": {
        "method": "prefill", "verification": "trie", "temperature": 1.0, "seed": 1,
    },
}  # fmt: skip
LONG = " ".join(f"The {i}th stone lay by the water." for i in range(1, 180))  # about 1,500 tokens


def other_ms(step: Step) -> float:
    """Milliseconds of a step outside the models' passes."""
    return 1000 * (step.seconds - step.draft_seconds - step.verify_seconds)


def measure(
    model: OmniDraft, prompts: list[str], max_tokens: int, k: int, way: dict[str, Any]
) -> dict[str, Any]:
    """The steps of all answers but the first."""
    steps: list[Step] = []
    for i, prompt in enumerate(prompts):
        for chunk in model.stream(prompt, k=k, max_tokens=max_tokens, **way).chunks():
            if i and chunk.step:
                steps.append(chunk.step)
    costs = [other_ms(step) for step in steps]
    return {"steps": len(steps), "median_ms": median(costs), "mean_ms": mean(costs)}


def main(
    target: str = "qwen2.5-coder-0.5b",
    drafter: str = "smollm2-135m",
    k: int = 8,
    max_tokens: int = 32,
    prompts: Annotated[int, typer.Option(help="Answers each way, the first not counted.")] = 4,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print."""
    model = load(target, drafter)
    model.trie("prefill")
    rows = [{"way": way} | measure(model, PROMPTS[:prompts], max_tokens, k, WAYS[way]) for way in WAYS]
    for name, text in (("short", LONG[:400]), ("long", LONG)):
        tokens = len(model.prompt_tokens(text))
        row = measure(model, [text] * 3, max_tokens, k, WAYS["text, greedy"])
        rows.append({"way": f"text, greedy, a {name} context of {tokens} tokens"} | row)
    for row in rows:
        print(
            f"{row['way']}: median {row['median_ms']:.2f} ms, mean {row['mean_ms']:.2f} ms, {row['steps']} steps"
        )
    if out:
        out.write_text(json.dumps({"provenance": provenance() | {"k": k}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
