"""Counting Steps."""

from __future__ import annotations

from dataclasses import dataclass

from omnidraft.types import Step


@dataclass(slots=True)
class Stats:
    """What a sequence of Steps came to; counts only what was shown. Seconds are wall time, prefill included."""

    tokens: int = 0
    steps: int = 0
    proposing_steps: int = 0
    acceptance_sum: float = 0.0  # of accepted / proposed, a step (the paper's definition)
    drafted: int = 0  # draft tokens
    ngram_hits: int = 0  # accepted n-grams
    lookup_tokens: int = 0  # accepted, of look-ups
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def add(self, step: Step) -> None:
        """Count one Step."""
        self.tokens += len(step.tokens)
        self.steps += 1
        self.seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.drafted += len(step.draft.tokens)
        if step.proposal.tokens:
            self.proposing_steps += 1
            self.ngram_hits += step.ngram_hits
            self.lookup_tokens += step.accepted if step.proposal.source == "lookup" else 0
            self.acceptance_sum += step.accepted / len(step.proposal.tokens)

    def merge(self, other: Stats) -> None:
        """Count another sequence's Steps too."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed target tokens, averaged over the steps that proposed something; None if none did."""
        return self.acceptance_sum / self.proposing_steps if self.proposing_steps else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of the answer a pass of the target; None before the first."""
        return self.tokens / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of wall time, prefill included; None before the first step."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def other_seconds(self) -> float:
        """Seconds of everything that is not a model's pass: translation, drawing, bookkeeping."""
        return self.seconds - self.draft_seconds - self.verify_seconds

    def as_dict(self) -> dict[str, float | int | None]:
        """The stable JSON form, as `omnidraft generate --json` prints it."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "plain_steps": self.steps - self.proposing_steps,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rate": self.acceptance_rate,
            "drafted": self.drafted,
            "ngram_hits": self.ngram_hits,
            "lookup_tokens": self.lookup_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
        }
