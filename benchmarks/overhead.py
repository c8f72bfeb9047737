"""What a step costs outside the models' passes: milliseconds by way of decoding, and by length of the context.

Real models, several short answers each way, medians and means over steps; the first answer of each way warms up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer

from omnidraft import OmniDraft, load
from omnidraft.demo import PROMPTS
from omnidraft.provenance import provenance
from omnidraft.sampling import Sampler
from omnidraft.translate import SymbolTranslator
from omnidraft.types import Step
from omnidraft.verify import Walk

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


class Clock:
    """Seconds spent in some functions since the last reading; one inside another counts for both."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def watch(self, owner: type, name: str, label: str) -> None:
        """Count the time of a method from now on."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[label] = self.spent.get(label, 0.0) + perf_counter() - start

        setattr(owner, name, timed)

    def read(self) -> dict[str, float]:
        """Milliseconds since the last reading."""
        spent, self.spent = self.spent, {}
        return {label: 1000 * seconds for label, seconds in spent.items()}


clock = Clock()
clock.watch(SymbolTranslator, "translate", "translate")
clock.watch(Walk, "__call__", "walk")
clock.watch(Sampler, "law", "law")


def other_ms(step: Step) -> float:
    """Milliseconds of a step outside the models' passes."""
    return 1000 * (step.seconds - step.draft_seconds - step.verify_seconds)


def measure(
    model: OmniDraft, prompts: list[str], max_tokens: int, k: int, way: dict[str, Any]
) -> dict[str, Any]:
    """The steps of all answers but the first."""
    steps: list[Step] = []
    lookups: list[float] = []  # the trie's part: reading the proposal, and the walk without the target's law
    for i, prompt in enumerate(prompts):
        for chunk in model.stream(prompt, k=k, max_tokens=max_tokens, **way).chunks():
            spent = clock.read()
            if i and chunk.step:
                steps.append(chunk.step)
                lookups.append(spent.get("translate", 0) + max(0, spent.get("walk", 0) - spent.get("law", 0)))
    costs = [other_ms(step) for step in steps]
    return {
        "steps": len(steps),
        "median_ms": median(costs),
        "mean_ms": mean(costs),
        "trie_median_ms": median(lookups),
    }


def main(
    target: str = "qwen2.5-coder-0.5b",
    drafter: str = "smollm2-135m",
    engine: str = "auto",
    k: int = 8,
    max_tokens: int = 32,
    prompts: Annotated[int, typer.Option(help="Answers each way, the first not counted.")] = 4,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print."""
    model = load(target, drafter, engine=engine)
    model.trie("prefill")
    rows = [{"way": way} | measure(model, PROMPTS[:prompts], max_tokens, k, WAYS[way]) for way in WAYS]
    for name, text in (("short", LONG[:400]), ("long", LONG)):
        tokens = len(model.prompt_tokens(text))
        row = measure(model, [text] * 3, max_tokens, k, WAYS["text, greedy"])
        rows.append({"way": f"text, greedy, a {name} context of {tokens} tokens"} | row)
    for row in rows:
        costs = f"median {row['median_ms']:.2f} ms, mean {row['mean_ms']:.2f} ms"
        print(f"{row['way']}: {costs}, of it the trie {row['trie_median_ms']:.2f} ms; {row['steps']} steps")
    if out:
        out.write_text(
            json.dumps(
                {"provenance": provenance() | {"k": k, "engines": model.engines}, "rows": rows}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
