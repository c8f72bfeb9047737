"""The curve of an adaptation as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omnidraft.learn.adapt import rolling


def draw_curve(record: dict[str, Any], path: Path) -> None:
    """Draw what `omnidraft adapt` wrote: tokens per step along the stream, and held out before and after."""
    from matplotlib.figure import Figure

    curve, held_out = record["curve"], record["held_out"]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    answers = [point["answer"] for point in curve]
    axes.plot(answers, rolling(curve), color="#0072b2", label="stream, last 20 answers")
    # Colours and marks that differ in lightness too: for readers who see no hue.
    for when, x, colour, mark in (("before", 0, "#d55e00", "s"), ("after", len(curve), "#000000", "o")):
        found = held_out[when]
        low, high = found["tokens_per_step_interval"]
        value = found["tokens_per_step"]
        axes.errorbar(
            [x],
            [value],
            [[value - low], [high - value]],
            color=colour,
            marker=mark,
            capsize=3,
            linestyle="none",
            label=f"held out, {when}",
        )
    axes.set_xlabel("answers")
    axes.set_ylabel("tokens per step")
    axes.set_title(f"{record['drafter']} learns from {record['target']}: {record['task']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
