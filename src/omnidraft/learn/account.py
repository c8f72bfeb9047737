"""What learning has come to."""

from __future__ import annotations

from dataclasses import dataclass

from omnidraft.learn.updates import Update


@dataclass(slots=True)
class Account:
    """What learning has come to so far; saved with the profile."""

    answers: int = 0
    held_out: int = 0
    untraced: int = 0  # answers that the drafter's vocabulary cannot spell
    positions: int = 0  # draft tokens with a teacher
    skipped_positions: int = 0  # without one
    updates: int = 0
    skipped_updates: int = 0  # not finite
    reverted: int = 0
    loss: float | None = None  # of the last update, nats a position
    head_updates: int = 0
    head_loss: float | None = None
    seconds: float = 0.0  # of learning, all of it

    def count(self, update: Update) -> None:
        """Count one step of the optimiser."""
        head = update.head
        if update.loss is not None:
            self.loss = update.loss
            self.updates += not update.skipped
        if head:
            self.head_loss = head.loss
            self.head_updates += not head.skipped
        self.skipped_updates += update.skipped + (head is not None and head.skipped)
