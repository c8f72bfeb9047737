"""One step of an optimiser: gradients averaged, clipped, and taken only if all is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Update:
    """What one step of the optimiser came to."""

    loss: float | None  # mean over positions with a teacher, nats; None where the head alone was trained
    positions: int
    skipped: bool  # the loss or its gradient was not finite: nothing was changed
    head: Update | None = None  # of the head, its positions being those with a label


def take(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    total: float,
    positions: int,
    clip: float,
) -> Update:
    """Step by the gradients of `total`, a sum over `positions`. `clip`: of the mean gradient's norm."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= max(positions, 1)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
    finite = math.isfinite(total) and math.isfinite(norm)
    if finite:
        optimizer.step()
    return Update(total / max(positions, 1), positions, skipped=not finite)
