"""When and how a learner learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from omnidraft.errors import OptionError, is_count, is_number
from omnidraft.learn.trainer import Training

When = Literal["off", "between", "idle"]


@dataclass(frozen=True, slots=True)
class Learning:
    """When and how to learn.

    when: `between` requests, right after an answer is out; `idle`, in the background, which yields at once when a
    request comes; or `off`, when a profile is used as it is. budget: the share of wall time that learning may take
    under `between`. held_out: every so many answers one is never trained on, and judges the others. gamma: a draft
    ends where its chance to be accepted as a whole falls below 1 - gamma, by the head.

    Raises:
        OptionError: a value outside its range.
    """

    when: When = "between"
    budget: float = 0.3
    held_out: int = 10
    gamma: float = 0.5
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if self.when not in get_args(When):
            raise OptionError(f"unknown learn {self.when!r}; use one of {', '.join(get_args(When))}")
        if not (is_number(self.budget) and 0 < self.budget <= 1):
            raise OptionError(f"budget is {self.budget!r}; it is a share of the time, above 0 and at most 1")
        if not (is_number(self.gamma) and 0 <= self.gamma <= 1):
            raise OptionError(f"gamma is {self.gamma!r}; it is a probability, 0 to 1")
        if not (is_count(self.held_out) and self.held_out >= 2):
            raise OptionError(f"held_out is {self.held_out!r}; it must be an integer, 2 or more")
