"""The loop, and its Steps as text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from omnidraft.control import Control
from omnidraft.drafting import Drafter
from omnidraft.lookup import Lookup
from omnidraft.sampling import Sampler
from omnidraft.session import Session, feed
from omnidraft.types import Draft, Proposal, Provenance, Step, as_tokens
from omnidraft.verify import Compare, Rule
from omnidraft.vocab import Vocab


def decode(
    target: Session,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    lookup: Lookup | None = None,
    sampler: Sampler,
    rule: Rule,
    control: Control,
    max_tokens: int,
    ends: Collection[int],
) -> Iterator[Step]:
    """Speculative decoding (paper algorithm 1); without a drafter and a look-up, plain decoding.

    `rule` verifies what the drafter drafted; what was looked up was drawn from no law, and is compared.
    Yields until a token in `ends` or `max_tokens` tokens. Abandoning the iterator is safe at any Step: the
    next answer's `feed` puts the sessions right.
    """
    context, compare = as_tokens(prompt), Compare()
    while (room := len(prompt) + max_tokens - len(context)) > 0:
        start = perf_counter()
        drafted_before = drafter.session.seconds if drafter else 0.0
        verified_before = target.seconds
        matched = lookup.match(context) if lookup else 0
        behind = len(context) - drafter.seen if drafter else 0
        source, k = control.choose(room - 1, matched, behind)
        proposer = lookup if source == "lookup" else drafter
        draft, proposal = proposer.propose(context, k) if proposer and k else (Draft(()), Proposal(()))
        if len(proposal.tokens) >= room:
            proposal = replace(
                proposal, tokens=proposal.tokens[: room - 1], lengths=proposal.lengths[: room - 1]
            )
        rows = feed(target, context + as_tokens(proposal.tokens), rows=len(proposal.tokens) + 1)
        verdict = (rule if draft.tokens else compare)(rows, draft, proposal, sampler, ends)
        if drafter:
            drafter.translator.observe(verdict.tokens, proposal, verdict.accepted)
        first = len(context) == len(prompt)
        context.extend(verdict.tokens)
        step = Step(
            draft=draft,
            proposal=proposal,
            tokens=verdict.tokens,
            accepted=verdict.accepted,
            rows=rows,
            draft_seconds=drafter.session.seconds - drafted_before if drafter else 0.0,
            verify_seconds=target.seconds - verified_before,
            seconds=perf_counter() - start,
        )
        control.saw(step, first)
        yield step
        if verdict.tokens[-1] in ends:
            return


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one Step shows: for each of its tokens the text that became certain, and where it came from. The last chunk
    of an answer may hold only text that was held back, and no step."""

    pieces: tuple[tuple[str, Provenance], ...]
    step: Step | None
    stopped: bool = False  # a stop string was reached

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


def stream_text(steps: Iterator[Step], vocab: Vocab, stop: Sequence[str]) -> Iterator[Chunk]:
    """The Steps' text as it becomes certain: no half character, nothing that may still turn out a stop string.

    A stop string ends the answer before its first character; the step that completes it is cut after the
    token that does, so statistics count what was shown. An incomplete last character is left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = ""
    source: Provenance = "free"
    for step in steps:
        pieces: list[tuple[str, Provenance]] = []
        for i, token in enumerate(step.tokens):
            source = step.provenance(i)
            held += decoder.decode(vocab.pieces[token])
            if (end := _first_stop(held, stop)) is not None:
                pieces.append((held[:end], source))
                cut = replace(step, tokens=step.tokens[: i + 1], accepted=min(step.accepted, i + 1))
                yield Chunk(tuple(pieces), cut, stopped=True)
                return
            certain = len(held) - _may_begin_stop(held, stop)
            pieces.append((held[:certain], source))
            held = held[certain:]
        yield Chunk(tuple(pieces), step)
    if held:
        yield Chunk(((held, source),), None)


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    return min((at for string in stop if (at := text.find(string)) >= 0), default=None)


def _may_begin_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    for length in range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return length
    return 0
