"""Adapting a drafter to a stream of prompts as a user would send them, and what that gained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from omnidraft.engine import OmniDraft
from omnidraft.learn.learner import Learner
from omnidraft.stats import Stats

Point = dict[str, Any]
_PART = "stream"  # of the profile: how far it has come


def adapt(
    model: OmniDraft,
    learner: Learner,
    prompts: Sequence[str],
    held_out: Sequence[str],
    *,
    on_answer: Callable[[Point], None] = lambda point: None,
    **options: Any,
) -> dict[str, Any]:
    """Answer `prompts` in order while learning; measure on `held_out`, which is never learned from, before and after.

    What is done is saved with the learner's profile: after a kill the same call goes on where that was; one with other
    prompts or options begins anew. Returns `curve`, one point an answer, and `held_out`, see `measured`.
    """
    known: dict[str, Any] = learner.documents.get(_PART, {})
    asked = [list(prompts), list(held_out), sorted((name, repr(value)) for name, value in options.items())]
    stream = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    if known.get("stream") != stream:
        known = {"stream": stream, "curve": [], "before": None}
    curve: list[Point] = known["curve"]
    if known["before"] is None:
        known["before"] = _measure(model, learner, held_out, options)
    learner.documents[_PART] = known
    for i in range(len(curve), len(prompts)):
        stats = model.generate(prompts[i], **options).stats
        account = asdict(learner.account)
        point = {
            "answer": i + 1,
            "tokens": stats.tokens,
            "steps": stats.steps,
            "acceptance_rate": stats.acceptance_rate,
            "drafted": stats.drafted,
            "seconds": stats.seconds,
            "ngram_hits": stats.ngram_hits,
            "updates": account["updates"],
            "loss": account["loss"],
            "head_updates": account["head_updates"],
            "head_loss": account["head_loss"],
            "learning_seconds": account["seconds"],
        }
        curve.append(point)
        on_answer(point)
    learner.save()
    after = _measure(model, learner, held_out, options)
    return {"curve": curve, "held_out": {"before": measured(known["before"]), "after": measured(after)}}


def _measure(
    model: OmniDraft, learner: Learner, prompts: Sequence[str], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each prompt takes; nothing is learned from it."""
    results = []
    with learner.paused():
        for prompt in prompts:
            stats = model.generate(prompt, **options).stats
            results.append(
                {
                    "tokens": stats.tokens,
                    "steps": stats.steps,
                    "acceptance_rate": stats.acceptance_rate,
                    "drafted": stats.drafted,
                    "seconds": stats.seconds,
                }
            )
    return results


def measured(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per step, acceptance rate and tokens per second over prompts; 95 % bootstrap intervals, by prompt."""
    if not results:
        return {"prompts": 0}
    tokens, steps, seconds = (
        np.array([one[name] for one in results], float) for name in ("tokens", "steps", "seconds")
    )
    # An answer for which nothing was proposed has none.
    rates = np.array([one["acceptance_rate"] for one in results if one["acceptance_rate"] is not None])

    def draws(count: int) -> Any:
        return np.random.default_rng(0).integers(0, count, (2000, count))

    def interval(values: Any) -> list[float]:
        return [float(bound) for bound in np.quantile(values, [0.025, 0.975])]

    drawn = draws(len(results))

    return {
        "prompts": len(results),
        "tokens": int(tokens.sum()),
        "steps": int(steps.sum()),
        "tokens_per_step": float(tokens.sum() / steps.sum()),
        "tokens_per_step_interval": interval(tokens[drawn].sum(1) / steps[drawn].sum(1)),
        "acceptance_rate": float(rates.mean()) if len(rates) else None,
        "acceptance_rate_interval": interval(rates[draws(len(rates))].mean(1)) if len(rates) else None,
        "drafted_per_step": sum(one["drafted"] for one in results) / float(steps.sum()),
        "tokens_per_second": float(tokens.sum() / seconds.sum()),
    }


def rolling(curve: Sequence[Point], width: int = 20) -> list[float]:
    """Tokens per step over the last `width` answers, at each point of a curve."""
    values = []
    for i in range(len(curve)):
        stats = Stats()
        for point in curve[max(0, i + 1 - width) : i + 1]:
            stats.tokens += point["tokens"]
            stats.steps += point["steps"]
        values.append(stats.tokens / stats.steps)
    return values
