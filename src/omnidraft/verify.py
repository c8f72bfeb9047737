"""The rule: which of the proposed tokens are the target's own."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from omnidraft.sampling import Sampler
from omnidraft.types import Proposal, Row, Verdict


def compare(
    rows: Iterable[Row],  # m + 1 rows of [V_target] float32 logits: the proposal's positions and the next
    proposal: Proposal,
    sampler: Sampler,
    ends: Collection[int],
) -> Verdict:
    """Draw each position's token from the target and go on while it equals the proposed one (DESIGN 3a).

    The answer is the target's own draw at every position, so the law is exact for any proposal at every
    temperature; greedy is its limit. Rows are looked at lazily, and none after a token in `ends`.
    """
    tokens: list[int] = []
    for row, proposed in zip(rows, (*proposal.tokens, None), strict=False):
        tokens.append(sampler.draw(row))
        if tokens[-1] != proposed:
            return Verdict(tuple(tokens), accepted=len(tokens) - 1)
        if tokens[-1] in ends:
            break
    return Verdict(tuple(tokens), accepted=len(tokens))
