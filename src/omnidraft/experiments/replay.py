"""Decoding a recorded answer: only the drafter runs, and each of its passes once, whichever method asks.

At temperature 0, and under `compare` with a seed, an answer does not depend on what is proposed. So decoding the
target's recorded answer is decoding: `experiments/validation.py` holds it against the real thing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from omnidraft.bench import method_options
from omnidraft.control import Fixed
from omnidraft.decode import decode
from omnidraft.drafting import Drafter, Stop
from omnidraft.experiments.experiment import Measured
from omnidraft.learn.record import Recorded, RecordedSession
from omnidraft.ngrams import Eviction, Trie
from omnidraft.options import make_options
from omnidraft.sampling import Sampler, Sampling
from omnidraft.session import Session, feed
from omnidraft.spellings import Lexicon
from omnidraft.stats import Stats
from omnidraft.translate import SymbolTranslator, TextTranslator, Translator
from omnidraft.types import Draft, Proposal, Rows, Step, as_tokens
from omnidraft.verify import Compare, Paper, Rule, Walk

IDEAL = "ideal"  # a method: proposes the answer's own tokens
Who = Literal[
    "", "perfect", "kept"
]  # drafts: the drafter, a perfect one, the drafter with its own spelling kept
_KEPT = 256  # entries of a row


class Memo(Session):
    """A drafter's session that runs each pass once, whichever method asks; keeps the likeliest tokens of a row."""

    def __init__(self, session: Session, width: int) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self._rows: dict[bytes, tuple[Any, Any]] = {}
        self._hidden: dict[bytes, Rows] = {}  # of the passes that a head asked about
        self._last = b""
        self._width = width
        self._session = session

    def truncate(self, length: int) -> None:
        """See `omnidraft.session.Session`."""
        del self.tokens[length:]

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """One row at most: that is what drafting asks for."""
        self.tokens.extend(tokens)
        if not rows:
            return np.empty((0, self._width), np.float32)
        key = self.tokens.tobytes()
        if key not in self._rows:
            row = feed(self._session, self.tokens, 1)[0]
            ids = np.argpartition(-row, min(_KEPT, len(row) - 1))[:_KEPT]
            self._rows[key] = ids, row[ids]
        ids, logits = self._rows[key]
        self._last = key
        row = np.full((1, self._width), -np.inf, np.float32)
        row[0, ids] = logits
        return row

    @property
    def hidden(self) -> Rows:
        """See `omnidraft.session.Session`. Of the last pass, which is made again if only its row is remembered."""
        if self._last not in self._hidden:
            if self._session.tokens.tobytes() != self._last:
                feed(self._session, array("i", self._last), 1)
            self._hidden[self._last] = self._session.hidden[-1:]
        return self._hidden[self._last]


class Perfect(Drafter):
    """Writes the recorded answer, as its tokenizer spells it: what it loses is translation's alone."""

    answer: bytes
    prompt: int  # length, tokens

    def propose(self, context: Sequence[int], k: int) -> Any:
        """See `Drafter`."""
        alignment = self.translator.alignment
        done = len(alignment.target.decode(context[self.prompt :]))
        tokens = alignment.draft.encode_bytes(self.answer[done:])[:k]
        usable = [bool(self.translator.usable[token]) for token in tokens]
        draft = Draft(tuple(tokens[: usable.index(False)] if False in usable else tokens))
        return draft, self.translator.translate(context, draft)


class Kept(Drafter):
    """Keeps its own spelling of what was accepted, and spells the target's own token behind it.

    Drafters otherwise re-tokenise behind the last word's start, as if the text had been given to them.
    """

    _written: tuple[int, ...] = ()

    def propose(self, context: Sequence[int], k: int) -> Any:
        """See `Drafter`."""
        target, own = self.translator.alignment.target, self.translator.alignment.draft
        new = context[self.seen :]
        if self._written and not any(token in target.special_text for token in new):
            data = target.decode(new)
            for token in self._written:
                if not (own.pieces[token] and data.startswith(own.pieces[token])):
                    break
                self._context.tokens.append(token)
                data = data[len(own.pieces[token]) :]
            self._context.tokens.extend(own.encode_bytes(data))
            self.seen = len(context)
        draft, proposal = super().propose(context, k)
        self._written = draft.tokens
        return draft, proposal


class Ideal(TextTranslator):
    """Proposes the answer's own tokens, as many as the drafted bytes cover: no translation can do better."""

    answer: Sequence[int]
    prompt: int  # length, tokens

    def translate(self, context: Sequence[int], draft: Draft) -> Proposal:
        """See `Translator`."""
        room = len(self.alignment.draft.decode(draft.tokens))
        tokens: list[int] = []
        for token in self.answer[len(context) - self.prompt :]:
            room -= len(self.alignment.target.pieces[token])
            if room < 0:
                break
            tokens.append(token)
        return Proposal(tuple(tokens))


class Replay:
    """Decodes recorded answers by one method. N-grams met are carried from answer to answer."""

    def __init__(
        self,
        lexicon: Lexicon,
        method: str,  # as for `omnidraft bench`, or IDEAL
        k: int,
        *,
        who: Who = "",
        stop: Stop | None = None,
        capacity: int | None = None,
        eviction: Eviction = "lfu",
    ) -> None:
        self.stop = stop
        self._who = who
        self._control = Fixed(k)
        alignment = lexicon.alignment
        strategy = make_options(**method_options("text" if method == IDEAL else method)).strategy
        self.trie = Trie(lexicon, splits=strategy.splits, capacity=capacity, eviction=eviction)
        if strategy.method == "prefill":
            self.trie.fill()
        self._translator: Translator
        if method == IDEAL:
            self._translator = Ideal(alignment)
        elif strategy.method == "text":
            self._translator = TextTranslator(alignment)
        else:
            self._translator = SymbolTranslator(
                self.trie, walk=strategy.verification == "trie", grow=strategy.method == "ngram"
            )
        self._grows = strategy.method == "ngram"
        rules: dict[str, Rule] = {"trie": Walk(self.trie), "paper": Paper(self.trie)}
        self._rule = rules.get(strategy.verification, Compare())
        self._target = RecordedSession(alignment.target.width)

    def know(self, answers: Iterable[Recorded]) -> None:
        """Begin with the n-grams of these answers, if the method keeps any."""
        if self._grows:
            for one in answers:
                self.trie.insert(one.answer)

    def answer(self, one: Recorded, session: Session, context_length: int = 2**31) -> Measured:
        """What one answer takes.

        Raises:
            RuntimeError: what was decoded is not the recorded answer.
        """
        vocab = self._translator.alignment.target
        sampler = Sampler(Sampling(seed=0), one.prompt, vocab.size)
        kind = {"": Drafter, "perfect": Perfect, "kept": Kept}[self._who]
        needed = sampler if self._rule.needs_laws else None
        drafter = kind(session, self._translator, context_length, needed, self.stop)
        if isinstance(drafter, Perfect):
            drafter.answer, drafter.prompt = vocab.decode(one.answer), len(one.prompt)
        if isinstance(self._translator, Ideal):
            self._translator.answer, self._translator.prompt = one.answer, len(one.prompt)
        self._target.begin(one.prompt, one.answer)
        stats, tokens, more = Stats(), list[int](), Counter[str]()
        for step in decode(
            self._target, drafter, one.prompt, sampler=sampler, rule=self._rule, control=self._control,
            max_tokens=len(one.answer), ends=vocab.eos,
        ):  # fmt: skip
            stats.add(step)
            tokens += step.tokens
            more += counts_of(step)
        if tokens != one.answer:
            raise RuntimeError(
                "replaying changed an answer; decoding is broken, and its numbers mean nothing"
            )
        return counted(stats, more)


def counts_of(step: Step) -> Counter[str]:
    """What `Stats` does not count: proposed tokens, and the n-grams that were looked at."""
    judged = sum(length > 1 for length in step.proposal.lengths[: step.accepted + 1])
    return Counter(proposed=len(step.proposal.tokens), ngrams_judged=judged)


def counted(stats: Stats, more: Counter[str]) -> Measured:
    """What an answer took, as it is kept."""
    return dict(
        tokens=stats.tokens, steps=stats.steps, acceptance=stats.acceptance_rate, ngram_hits=stats.ngram_hits,
        drafted=stats.drafted,
        **{name: more[name] for name in ("proposed", "ngrams_judged")},
    )  # fmt: skip


def by_prompt(answers: Sequence[Measured]) -> Measured:
    """One list for each number."""
    return {name: [one[name] for one in answers] for name in (answers[0] if answers else ())}
