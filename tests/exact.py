"""Laws by enumeration: the production loop run once for every outcome of its draws, on pairs of a few tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TypeVar

import numpy as np
from toy import ToySession

from omnidraft.control import Fixed
from omnidraft.decode import decode
from omnidraft.drafting import Drafter, Stop
from omnidraft.lookup import END, History, Lookup
from omnidraft.sampling import Noise, Sampler, Sampling
from omnidraft.spellings import Lexicon
from omnidraft.translate import Translator
from omnidraft.types import Row, Rows
from omnidraft.verify import Rule
from omnidraft.vocab import Alignment, Vocab

T = TypeVar("T")
Law = dict[tuple[int, ...], float]
Method = Callable[["Pair"], tuple[Translator, Rule]]


class Branches(Noise):
    """Takes every outcome of positive probability in turn, depth first; `probability` is that of this run."""

    def __init__(self) -> None:
        self.probability = 1.0
        self._left: list[
            list[int]
        ] = []  # for each draw of the run its outcomes not done with, this run's last
        self._drawn = 0

    def fresh(self, p: Row) -> int:
        p = np.asarray(p, np.float64)
        assert p.min() >= 0
        if self._drawn == len(self._left):
            self._left.append(np.flatnonzero(p).tolist())
        outcome = self._left[self._drawn][-1]
        self._drawn += 1
        self.probability *= float(p[outcome] / p.sum())
        return outcome

    def at(self, position: int, p: Row) -> int:
        return self.fresh(p)  # a rule that compares asks once for each position

    def next_run(self) -> bool:
        """Go to the next run; whether there is one."""
        self.probability, self._drawn = 1.0, 0
        while self._left:
            self._left[-1].pop()
            if self._left[-1]:
                return True
            self._left.pop()
        return False


def outcomes(run: Callable[[Noise], T]) -> Iterator[tuple[T, float]]:
    """What `run` comes to for each sequence of draws, and the probability of it."""
    branches = Branches()
    while True:
        yield run(branches), branches.probability
        if not branches.next_run():
            return


class TinyVocab(Vocab):
    """A few pieces, encoded by longest match. Of two ids with the same bytes the higher is the canonical one."""

    def __init__(self, pieces: str, *, order: int) -> None:
        """`pieces`: texts with spaces between, `<...>` a special token, `<eos...>` an end of an answer."""
        texts = pieces.split()
        random.Random(order).shuffle(texts)
        self.size = len(texts)
        self.width = self.size + order % 3
        self.specials = {text: id for id, text in enumerate(texts) if text.startswith("<")}
        self.bos = None
        self.eos = tuple(id for text, id in self.specials.items() if text.startswith("<eos"))
        ordinary = [b"" if text in self.specials else text.encode() for text in texts]
        self.pieces = (*ordinary, *[b""] * (self.width - self.size))
        self._ids = {piece: id for id, piece in enumerate(self.pieces) if piece}
        self._longest_first = sorted(self._ids, key=len, reverse=True)

    def encode_bytes(self, data: bytes) -> list[int]:
        tokens = []
        while data:
            piece = next((piece for piece in self._longest_first if data.startswith(piece)), None)
            if piece:
                tokens.append(self._ids[piece])
            data = data[len(piece or data[:1]) :]
        return tokens

    def encode_many(self, pieces: Sequence[bytes]) -> list[list[int]]:
        return [self.encode_bytes(piece) for piece in pieces]


class RandomModel:
    """A law drawn at random for each context. Rows are in double precision, so an enumeration is exact."""

    def __init__(self, vocab: Vocab, seed: int) -> None:
        self.vocab = vocab
        self._seed = seed
        self._rows: dict[tuple[int, ...], Row] = {}

    def row(self, context: Sequence[int]) -> Row:
        """Logits after `context`, those of ids that only pad the row among them. [width] float64"""
        key = tuple(context)
        if key not in self._rows:
            generator = np.random.default_rng([self._seed, *key])
            self._rows[key] = np.log(generator.dirichlet(np.ones(self.vocab.width)))
        return self._rows[key]

    def session(self) -> ToySession:
        return _Shown(self)  # type: ignore[arg-type]


class _Shown(ToySession):
    """A session whose hidden state is the row it gives."""

    @property
    def hidden(self) -> Rows:
        return np.exp(self._model.row(self.tokens))[None]


@dataclass(frozen=True)
class Pair:
    """A drafter and a target by their pieces."""

    draft: str
    target: str
    seed: int = 0
    prompt: bytes = b"ab"

    @cached_property
    def drafter_model(self) -> RandomModel:
        return RandomModel(TinyVocab(self.draft, order=2 * self.seed + 1), seed=2 * self.seed + 1)

    @cached_property
    def target_model(self) -> RandomModel:
        return RandomModel(TinyVocab(self.target, order=2 * self.seed + 2), seed=2 * self.seed + 2)

    @cached_property
    def alignment(self) -> Alignment:
        return Alignment(self.drafter_model.vocab, self.target_model.vocab)

    @cached_property
    def lexicon(self) -> Lexicon:
        return Lexicon.build(self.alignment)

    @cached_property
    def context(self) -> list[int]:
        return self.target_model.vocab.encode_bytes(self.prompt)

    def own_law(self, sampling: Sampling, length: int, start: tuple[int, ...] = ()) -> Law:
        """The target's own law of an answer's first `length` tokens, given those in `start`; fewer where it ends."""
        vocab = self.target_model.vocab
        if len(start) >= length or (start and start[-1] in vocab.eos):
            return {start[:length]: 1.0}
        sampler = Sampler(sampling, self.context, vocab.size)
        for token in start:
            sampler.commit(token)
        p = sampler.law(self.target_model.row([*self.context, *start]))
        return {
            answer: probability * float(p[token] / p.sum())
            for token in np.flatnonzero(p).tolist()
            for answer, probability in self.own_law(sampling, length, (*start, token)).items()
        }

    def drafted_law(
        self,
        method: Method,
        *,
        k: int,
        sampling: Sampling,
        length: int,
        steps: int | None = None,
        max_tokens: int = 99,
        history: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> Law:
        """The same law, as the loop gives it. With a `history` of tokens whatever can be looked up is.

        After so many `steps` the target goes on alone: a step that is exact behind every context is exact behind
        another step, and one takes far fewer runs than two.
        """
        vocab = self.target_model.vocab

        def run(noise: Noise) -> tuple[int, ...]:
            sampler = Sampler(sampling, self.context, vocab.size, noise=noise)
            translator, rule = method(self)
            drafter = Drafter(
                self.drafter_model.session(),
                translator,
                4096,
                sampler if rule.needs_laws else None,
                stop,
            )
            met = None if history is None else History(100, [*history, END])
            loop = decode(
                self.target_model.session(),
                drafter,
                self.context,
                lookup=Lookup(met) if met else None,
                sampler=sampler,
                rule=rule,
                control=Fixed(k, long_enough=1),
                max_tokens=max_tokens,
                ends=vocab.eos,
            )
            answer: tuple[int, ...] = ()
            for step in islice(loop, steps):
                answer += step.tokens
                if len(answer) >= length:
                    break
            return answer[:length]

        reached: Law = defaultdict(float)
        for answer, probability in outcomes(run):
            reached[answer] += probability
        law: Law = defaultdict(float)
        for start, reaching in reached.items():
            for answer, probability in self.own_law(sampling, length, start).items():
                law[answer] += reaching * probability
        return law


def error(law: Law, other: Law) -> float:
    """The largest difference between the probabilities of an answer."""
    return max(abs(law.get(answer, 0) - other.get(answer, 0)) for answer in {*law, *other})
