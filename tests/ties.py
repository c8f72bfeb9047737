"""When may two answers differ? Only where the target's own rows, over passes of 1 to 8 tokens, cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnidraft.sampling import Sampling, law, uniform
from omnidraft.session import Model, feed
from omnidraft.types import Rows


def rows_over_passes(target: Model, context: Sequence[int]) -> Rows:
    """The row after `context` as computed by passes of m = 1..8 tokens. [8, V]"""
    rows = []
    for m in range(1, 9):
        session = target.session()
        feed(session, context[: len(context) - m], 1)
        rows.append(feed(session, context, m)[-1])
    return np.stack(rows)


def assert_equal_but_for_ties(
    target: Model, prompt: Sequence[int], plain: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> bool:
    """Whether the answers are equal; fails when they differ by more than a tie."""
    if list(plain) == list(answer):
        return True
    at = next((i for i, (a, b) in enumerate(zip(plain, answer, strict=False)) if a != b), None)
    assert at is not None, f"one answer ends before the other: {plain} {answer}"
    rows = rows_over_passes(target, [*prompt, *plain[:at]])[:, : target.vocab.size]
    spread = float(np.ptp(rows, axis=0).max())
    a, b = plain[at], answer[at]
    if sampling.temperature == 0:
        gap = float(np.abs(rows[:, a] - rows[:, b]).min())
        assert gap <= spread, f"position {at}: {a} and {b} are {gap} apart, the spread is {spread}"
        return False
    # Sampling: the noise must fall where the tokens' intervals meet, within what the spread does to the law.
    cdfs = np.stack([np.cumsum(law(row, sampling), dtype=np.float64) for row in rows])
    cdfs /= cdfs[:, -1:]
    wobble = float(np.ptp(cdfs, axis=0).max()) + spread / sampling.temperature
    x = uniform(sampling.seed or 0, at)
    low, high = min(a, b), max(a, b)
    distance = float(np.abs(cdfs[:, low:high] - x).min())
    assert distance <= wobble, (
        f"position {at}: {a} and {b} part {distance} from the noise, the wobble is {wobble}"
    )
    return False
