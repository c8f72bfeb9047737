"""Methods side by side on the same prompts: interleaved, repeated, each answer from the same state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from omnidraft.decode import Chunk
from omnidraft.engine import OmniDraft
from omnidraft.errors import OptionError
from omnidraft.options import make_options
from omnidraft.session import Model
from omnidraft.stats import Stats


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt answered once by one method."""

    task: str
    method: str
    repeat: int
    prompt: int  # index within the task
    tokens: tuple[int, ...]
    stats: Stats


def run(
    target: Model,
    drafter: Model | None,
    tasks: Mapping[str, Sequence[str]],  # task -> prompts
    methods: Sequence[str],
    *,
    repeat: int = 1,
    on_run: Callable[[Run], None] = lambda run: None,
    on_chunk: Callable[[str, str, Chunk], None] = lambda method, prompt, chunk: None,
    **options: Any,
) -> list[Run]:
    """Answer every prompt by every method, `repeat` times.

    A method may name its verification, splits and k too: `prefill:trie`, `ngram:compare:nosplits`, `text:k4`. Methods
    take turns prompt by prompt, in rotated order, so that a machine that drifts does so under all of them; every
    answer starts from empty KV caches, every repeat of a task without n-grams and measurements. What `on_chunk` does
    is outside the clock.
    Options are those of `OmniDraft.stream`.

    Raises:
        OptionError: an option outside its range; before anything is decoded.
    """
    chosen = {method: options | method_options(method) for method in methods}
    for own in chosen.values():
        make_options(**own)
    runs = []
    for r in range(repeat):
        for task, prompts in tasks.items():
            models = {method: OmniDraft(target, drafter) for method in methods}
            for i, prompt in enumerate(prompts):
                turn = (i + r) % len(methods)
                for method in [*methods[turn:], *methods[:turn]]:
                    models[method].reset()
                    stream = models[method].stream(prompt, **chosen[method])
                    for chunk in stream.chunks():
                        on_chunk(method, prompt, chunk)
                    runs.append(Run(task, method, r, i, tuple(stream.tokens), stream.stats))
                    on_run(runs[-1])
    return runs


def method_options(method: str) -> dict[str, Any]:
    """The options that a method's name stands for: `method[:verification][:splits|:nosplits][:kN]`.

    Raises:
        OptionError: k is no number.
    """
    name, *details = method.split(":")
    options: dict[str, Any] = {"method": name}
    for detail in details:
        if detail in ("splits", "nosplits"):
            options["splits"] = detail == "splits"
        elif detail[:1] == "k":
            if not detail[1:].isdecimal():
                raise OptionError(f"method {method!r} gives no number with k; write it as {name}:k4")
            options["k"] = int(detail[1:])
        else:
            options["verification"] = detail
    return options


def rows(runs: Sequence[Run], *, k: int | None, temperature: float, seed: int | None) -> list[dict[str, Any]]:
    """One row per task and method, in the stable form of `omnidraft bench --json`.

    Speeds are totals over the prompts of a repeat, medians over repeats; `speedup` is the median over repeats
    of the ratio to `plain` in the same repeat (None without it). `identical` counts the prompts whose answer
    is the same as plain's. `k`: None where as many are drafted as pay.
    """
    table = []
    keys = dict.fromkeys((run.task, run.method) for run in runs)
    for task, method in keys:
        own = [run for run in runs if (run.task, run.method) == (task, method)]
        plain = [run for run in runs if (run.task, run.method) == (task, "plain")]
        total = Stats()
        for one in own:
            total.merge(one.stats)
        speed, plain_speed = _speeds(own), _speeds(plain)
        answers, plain_answers = ({run.prompt: run.tokens for run in some} for some in (own, plain))
        table.append(
            {
                "task": task,
                "method": method,
                "k": None if method == "plain" else method_options(method).get("k", k),
                "temperature": temperature,
                "seed": seed,
                "prompts": len(answers),
                "tokens": total.tokens,
                "steps": total.steps,
                "acceptance_rate": total.acceptance_rate,
                "tokens_per_step": total.tokens_per_step,
                "lookup_tokens_per_step": total.lookup_tokens / total.steps if total.lookup_tokens else None,
                "ngram_hits_per_step": total.ngram_hits / total.steps if total.ngram_hits else None,
                "tokens_per_second": median(speed.values()),
                "speedup": median(speed[r] / plain_speed[r] for r in speed) if plain else None,
                "other_ms_per_step": 1000 * total.other_seconds / total.steps,
                "identical": sum(answers[i] == plain_answers[i] for i in answers) if plain else None,
            }
        )
    return table


def _speeds(runs: Sequence[Run]) -> dict[int, float]:
    """repeat -> tokens per second over its prompts."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for run in runs:
        tokens[run.repeat] = tokens.get(run.repeat, 0) + run.stats.tokens
        seconds[run.repeat] = seconds.get(run.repeat, 0.0) + run.stats.seconds
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens}


def answers(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each run on its own, for paired statistics; the answer as a digest, since it may hold a user's text."""
    return [
        {
            "task": run.task,
            "method": run.method,
            "repeat": run.repeat,
            "prompt": run.prompt,
            "answer": hashlib.sha256(repr(run.tokens).encode()).hexdigest()[:16],
            **run.stats.as_dict(),
        }
        for run in runs
    ]
