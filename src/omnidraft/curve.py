"""What a pass over m tokens costs, and what speculation can make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from omnidraft.session import Model, feed

ACCEPTANCE_RATES = (0.3, 0.5, 0.7, 0.8, 0.9)
_COLOURS = ("#1f6feb", "#d1242f")


def measure(
    model: Model, sizes: Sequence[int], *, context: int = 64, repeat: int = 9
) -> dict[int, float]:  # m -> ms
    """The median time of a pass over m tokens behind `context` tokens, each m in turn in every repeat.

    The context is the same for all; what else a pass costs with time (clock, other programs) falls on all alike. Each
    pass is made twice and timed once: engines prepare for a size that is another than the last, and decoding repeats
    one.
    """
    session = model.session()
    ordinary = [token for token, piece in enumerate(model.vocab.pieces) if piece and piece.isalpha()]
    text = [ordinary[i * 7919 % len(ordinary)] for i in range(context + max(sizes))]
    times: dict[int, list[float]] = {m: [] for m in sizes}
    feed(session, text[:context], 1)
    for _ in range(repeat):
        for m in sizes:
            for _ in range(2):
                session.truncate(context)
                start = perf_counter()
                session.extend(text[context : context + m], m)
                seconds = perf_counter() - start
            times[m].append(1000 * seconds)
    return {m: median(own) for m, own in times.items()}


@dataclass(frozen=True, slots=True)
class Best:
    """The draft length with the greatest speedup over plain decoding at an acceptance rate; k = 0: do not draft."""

    acceptance_rate: float
    k: int
    tokens_per_step: float
    speedup: float


def best(curve: Mapping[int, float], draft_ms: float, acceptance_rate: float) -> Best:
    """The best k, if each proposed token is accepted with the same probability, one proposed for each drafted.

    A step of k then makes 1 + a + ... + a^k tokens in k drafter passes and one pass over k + 1 tokens.
    """
    found = Best(acceptance_rate, 0, 1.0, 1.0)
    for m, milliseconds in curve.items():
        tokens = sum(acceptance_rate**i for i in range(m))
        speedup = tokens * curve[1] / (milliseconds + (m - 1) * draft_ms)
        if speedup > found.speedup:
            found = Best(acceptance_rate, m - 1, tokens, speedup)
    return found


def svg(curve: Mapping[int, float], draft_curve: Mapping[int, float], labels: Sequence[str]) -> str:
    """The times of the target's passes and the drafter's over m, as a picture."""
    width, height, left, bottom = 640, 360, 60, 40
    top = 1.05 * max(*curve.values(), *draft_curve.values())
    last = max(curve)

    def at(m: float, ms: float) -> tuple[float, float]:
        return (
            left + (width - left - 20) * (m - 1) / max(1, last - 1),
            height - bottom - (height - bottom - 40) * ms / top,
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#57606a">'
    ]
    for i in range(5):
        x, y = at(1, top * i / 4)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{width - 20}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{top * i / 4:.0f}</text>')
    for m in curve:
        parts.append(
            f'<text x="{at(m, 0)[0]:.1f}" y="{height - bottom + 16}" text-anchor="middle">{m}</text>'
        )
    parts.append(f'<text x="{left}" y="{height - 6}">tokens of a pass; milliseconds upward</text>')
    for i, (points, colour) in enumerate(zip((curve, draft_curve), _COLOURS, strict=True)):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(m, ms) for m, ms in points.items()))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 8}" y="{16 + 16 * i}" fill="{colour}">{_escaped(labels[i])}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
