"""What steps cost: the speedup that tokens a step come to, by the step times that `table8` measured.

Speedup by Medusa's convention, as in the paper: tokens a step over the time of a step as a multiple of a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.experiments.experiment import Measured
from omnidraft.experiments.results import Results
from omnidraft.experiments.statistics import Interval, share


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a pair, milliseconds."""

    passes: Mapping[int, float]  # of the target, by its tokens
    draft: float  # of a draft token

    def of(self, run: Measured) -> list[float]:
        """What each prompt took in passes and drafts."""
        steps, proposed, drafted = (np.array(run[name], float) for name in ("steps", "proposed", "drafted"))
        sizes = sorted(self.passes)
        times = np.interp(1 + proposed / steps, sizes, [self.passes[size] for size in sizes])
        total: list[float] = (steps * times + drafted * self.draft).tolist()
        return total


def costs(table8: Results, target: str, drafter: str) -> Costs | None:
    """None where `table8` did not measure one of them."""
    passes, draft = table8.find(model=target, drafts=False), table8.find(model=drafter, drafts=True)
    if not passes or not draft:
        return None
    return Costs({int(size): ms for size, ms in passes[-1]["passes"].items()}, draft[-1]["passes"]["1"])


def speedup(runs: Sequence[Measured], its: Costs) -> Interval:
    """Against plain decoding, the same tokens one a pass."""
    plain = np.array([run["tokens"] for run in runs], float).sum(0) * its.passes[1]
    return share(plain.tolist(), np.array([its.of(run) for run in runs]).sum(0).tolist())
