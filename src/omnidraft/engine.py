"""What a user holds: a target and a drafter, loaded, and the answers they give."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft import hub
from omnidraft.answers import Answer, Stream
from omnidraft.control import Adaptive, Control, Fixed
from omnidraft.decode import decode, stream_text
from omnidraft.drafting import Drafter
from omnidraft.errors import ContextLengthError, OptionError
from omnidraft.lookup import Lookup
from omnidraft.ngrams import Eviction, Trie
from omnidraft.options import Message, Options, Strategy, make_options, messages_of
from omnidraft.sampling import Processor, Sampler
from omnidraft.session import Model, Session, common_prefix, feed
from omnidraft.spellings import Lexicon
from omnidraft.stats import Stats
from omnidraft.translate import SymbolTranslator, TextTranslator, Translator
from omnidraft.types import Step, as_tokens
from omnidraft.verify import Compare, Paper, Rule, Walk
from omnidraft.vocab import Alignment

if TYPE_CHECKING:
    from omnidraft.learn.learner import Learner
    from omnidraft.learn.profile import ProfileStore

_LONGEST_DRAFT, _LONGEST_LOOKUP = 8, 16  # tokens, where k is not given


class OmniDraft:
    """A target that answers faster through a drafter, losslessly. Made by `omnidraft.load`.

    KV caches are kept between requests, so a chat's next turn feeds only what is new. `stats` counts all
    requests so far.

    Threads: any number of OmniDrafts, each in its own thread, may share the same models. One OmniDraft may be called
    from several threads too: its requests take turns, step by step, so none waits on one that was abandoned; but they
    share its KV caches, so give each thread its own for speed.
    """

    def __init__(
        self,
        target: Model,
        drafter: Model | None,
        *,
        ngram_capacity: int | None = None,
        ngram_eviction: Eviction = "lfu",
    ) -> None:
        self._capacity = ngram_capacity
        self._eviction: Eviction = ngram_eviction
        self.target = target
        self.drafter = drafter
        self.stats = Stats()
        self.alignment = Alignment(drafter.vocab, target.vocab) if drafter else None
        self._target_session: Session = target.session()
        self._draft_session: Session | None = drafter.session() if drafter else None
        self.learner: Learner | None = None
        self._drafting = drafter  # the drafter as it is adapted now
        self._learners: dict[str | None, tuple[Any, Learner]] = {}  # profile -> (settings, learner)
        self._controls: dict[Strategy, Adaptive] = {}
        self._control: Control = Fixed(0)  # of the latest answer
        self._translators: dict[Strategy, Translator] = {}
        self._tries: dict[tuple[str, bool], Trie] = {}
        self._lock = threading.RLock()  # held for a step, never between steps

    @property
    def engines(self) -> dict[str, dict[str, str]]:
        """What runs the target and the drafter, in the form that `--json` prints."""
        return {
            role: dataclasses.asdict(model.engine)
            for role, model in (("target", self.target), ("drafter", self.drafter))
            if model
        }

    @property
    def control(self) -> dict[str, Any] | None:
        """What the policy of the latest answer knows of costs and acceptance; None where k was given."""
        return self._control.as_dict() if isinstance(self._control, Adaptive) else None

    def prompt_tokens(self, prompt: str | Sequence[Message], *, raw: bool = False) -> list[int]:
        """The target's token ids of a prompt: text as one user message (or as it is, `raw`), or chat messages.

        Raises:
            OptionError: an empty prompt, or text that is not valid Unicode.
        """
        messages = messages_of(prompt)
        if raw:
            if not isinstance(prompt, str):
                raise OptionError("raw takes text, not chat messages; pass a string, or leave raw out")
            return self.target.encode(prompt)
        return self.target.chat(messages)

    def stream(self, prompt: str | Sequence[Message], **options: Any) -> Stream:
        """The answer's text as it is decoded; `"".join` of it equals `generate`'s text.

        Options are the fields of `Options` and of `Sampling`, by name.

        Raises:
            OptionError: an unknown option, or a value outside its range.
            ContextLengthError: the prompt leaves no room for an answer.
        """
        chosen = make_options(**options)
        return self.answer(self.prompt_tokens(prompt, raw=chosen.raw), chosen)

    def answer(self, tokens: Sequence[int], chosen: Options) -> Stream:
        """The answer to a prompt of token ids.

        Raises:
            OptionError: the prompt has no tokens, or ids that the target has not.
            ContextLengthError: the prompt leaves no room for an answer.
        """
        if not tokens:
            raise OptionError(f"the prompt has no tokens of {self.target.name}; give some text")
        if not 0 <= min(tokens) <= max(tokens) < self.target.vocab.size:
            raise OptionError(
                f"the prompt holds ids that are no tokens of {self.target.name}; encode it by that model"
            )
        room = self.target.context_length - len(tokens)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens and {self.target.name} holds {self.target.context_length}; "
                "shorten the prompt"
            )
        limit = min(chosen.max_tokens, room)
        steps = self.steps(tokens, chosen, limit)
        return Stream(
            stream_text(steps, self.target.vocab, chosen.stop), self.target.vocab.eos, limit, self._count
        )

    def generate(self, prompt: str | Sequence[Message], **options: Any) -> Answer:
        """The whole answer; options and errors as in `stream`."""
        stream = self.stream(prompt, **options)
        text = "".join(stream)
        return Answer(text, tuple(stream.tokens), stream.finish_reason, stream.stats)

    @cached_property
    def lexicon(self) -> Lexicon:
        """Both vocabularies in base symbols; built once per pair and kept in the cache folder."""
        if self.alignment is None:
            raise OptionError("n-grams need a drafter; load one with drafter=...")
        return Lexicon.cached(self.alignment, hub.cache_root() / "lexicons")

    def trie(self, method: str, *, splits: bool = True) -> Trie:
        """The target tokens that `direct`, `ngram` or `prefill` can propose. That of `ngram` grows with use."""
        if self.learner and (method, splits) == ("ngram", True):
            return self.learner.ngrams
        with self._lock:
            if (method, splits) not in self._tries:
                capacity = self._capacity if method == "ngram" else None
                trie = Trie(self.lexicon, splits=splits, capacity=capacity, eviction=self._eviction)
                if method == "prefill":
                    trie.fill()
                self._tries[method, splits] = trie
            return self._tries[method, splits]

    def load_ngrams(self, path: str | Path, *, splits: bool = True) -> None:
        """Let method `ngram` begin with the n-grams of a file.

        Raises:
            NGramFileError: not such a file, a damaged one, or one of another pair of vocabularies.
        """
        with self._lock:
            self.trie("ngram", splits=splits).load(Path(path))

    def save_ngrams(self, path: str | Path, *, splits: bool = True) -> None:
        """Write the n-grams met so far; the file is replaced in one step.

        Raises:
            NGramFileError: the file cannot be written.
            OptionError: there is no drafter, so there are none.
        """
        drafter = self.drafter.name if self.drafter else ""
        with self._lock:
            self.trie("ngram", splits=splits).save(Path(path), drafter=drafter, target=self.target.name)

    def learn(
        self,
        when: str = "between",
        *,
        profile: str | None = None,
        budget: float = 0.3,
        gamma: float = 0.5,
        store: ProfileStore | None = None,
        **training: Any,
    ) -> Learner:
        """Let the drafter learn from every answer from now on (extra `learn`); the next request drafts with it.

        `when`, `budget`, `gamma`: see `omnidraft.learn.settings.Learning`; `off` uses a profile as it is. `training`:
        the fields of `omnidraft.learn.trainer.Training`. With a `profile` what was learned is kept on disk and gone on
        from; to switch to another, or back, call this again, which takes no time for one that was used before.

        Raises:
            OptionError: no drafter, one of an engine that cannot be adapted, or a value outside its range.
            MissingExtraError: PEFT is not there.
            ProfileError: the profile cannot be read or written.
        """
        from omnidraft.learn.learner import learner_for, learning_of  # they need torch

        settings = (when, budget, gamma, store, training)
        known = self._learners.get(profile)
        if known is None or known[0] != settings:
            if self.drafter is None:
                raise OptionError("there is no drafter to learn; load one with drafter=...")
            learning = learning_of(when, budget, gamma, training)
            self.release(profile)
            learner = learner_for(self.drafter, self.target, self.trie("prefill"), learning, profile, store)
            self._learners[profile] = settings, learner
        learner = self._learners[profile][1]
        self.follow(learner)
        return learner

    def follow(self, learner: Learner | None) -> None:
        """Draft by another learner from the next request on, or by none. `learn` does so too."""
        if learner is not self.learner:
            self.learner = learner
            self._translators = {}

    def release(self, profile: str | None) -> None:
        """Close a profile that `learn` opened: it is saved, and read anew when it is asked for again."""
        _, learner = self._learners.pop(profile, (None, None))
        if learner:
            learner.close()

    def close(self) -> None:
        """Stop learning, and save what was learned in the profiles that were used; answers go on as they were drafted.

        Raises:
            ProfileError: a profile cannot be written; the others are.
        """
        with contextlib.ExitStack() as closing:
            while self._learners:
                closing.callback(self._learners.popitem()[1][1].close)

    def reset(self) -> None:
        """Forget the KV caches; n-grams met stay."""
        with self._lock:
            self._target_session = self.target.session()
            self._draft_session = self._drafting.session() if self._drafting else None

    def fork(self) -> OmniDraft:
        """Another one with KV caches of its own, and all else in common: models, n-grams, what passes cost, profiles.

        So several answers can be under way in turns, and each goes on where its chat left off.
        """
        if self.alignment:
            self.lexicon  # noqa: B018 - read once for all
        with self._lock:
            twin = copy.copy(self)
        twin._translators = {}
        twin.reset()
        return twin

    def cached(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt the target's KV cache holds already."""
        return common_prefix(self._target_session.tokens, as_tokens(tokens))

    def prefill(self, tokens: Sequence[int], options: Options, part: int) -> Iterator[None]:
        """Feed a prompt to the KV caches, at most `part` tokens a turn; `answer` then has little left to feed."""
        with self._lock:
            drafter = self._new_drafter(options.strategy, None) if self.drafter else None
        context = as_tokens(tokens)
        for end in range(self.cached(tokens) + part, len(tokens), part):
            with self._lock:
                feed(self._target_session, context[:end], rows=1)
            yield
        if drafter:
            yield from drafter.prefill(context, part)

    def steps(
        self, prompt: Sequence[int], options: Options, limit: int, ends: Collection[int] | None = None
    ) -> Iterator[Step]:
        """The Steps of an answer of at most `limit` tokens to a prompt of token ids, which must fit the context.

        `ends`: the tokens that end it, the vocabulary's if None.
        """
        with self._lock:
            steps = self._steps(prompt, options, limit, self.target.vocab.eos if ends is None else ends)
        return self._in_turn(steps)

    def _in_turn(self, steps: Iterator[Step]) -> Iterator[Step]:
        while True:
            with self._lock:
                step = next(steps, None)
            if step is None:
                return
            yield step

    def _count(self, step: Step) -> None:
        with self._lock:
            self.stats.add(step)

    def _steps(
        self, tokens: Sequence[int], options: Options, limit: int, ends: Collection[int]
    ) -> Iterator[Step]:
        vocab = self.target.vocab
        strategy = options.strategy
        processors = self._processors(options, len(tokens))
        if self.drafter is None and options.method == "auto":
            strategy = Strategy("lookup", "compare", splits=False, lookup=True)
        sampler = Sampler(
            options.sampling,
            tokens,
            vocab.size,
            processors=processors,
            target=self.target.name,
            drafter=self.drafter.name if self.drafter else "",
        )
        rule = self._rule(strategy)
        self._control = self._new_control(strategy, options.k)
        steps = decode(
            self._target_session,
            self._new_drafter(strategy, sampler if rule.needs_laws else None),
            tokens,
            lookup=Lookup(self.learner.history if self.learner else None) if strategy.lookup else None,
            sampler=sampler,
            rule=rule,
            control=self._control,
            max_tokens=limit,
            ends=ends,
        )
        if self.learner is None:
            return steps
        # What is learned of a draft depends on whether it was drawn.
        return _observed(
            steps, self.learner, tokens, options.sampling.temperature if rule.needs_laws else 0.0
        )

    def _processors(self, options: Options, prompt_length: int) -> list[Processor]:
        """The answer's own: what has a state begins anew."""
        if not options.processors and options.json_schema is None:
            return []
        from omnidraft.processors import Grammar, as_processor, json_schema

        given: list[Any] = [*options.processors]
        if options.json_schema is not None:
            given.append(json_schema(self.target.vocab, options.json_schema))
        return [
            one.processor(prompt_length) if isinstance(one, Grammar) else as_processor(one) for one in given
        ]

    def _new_control(self, strategy: Strategy, k: int | None) -> Control:
        alone = strategy.method == "lookup"
        if k is not None:
            return Fixed(k, long_enough=1) if alone else Fixed(k)
        # What passes cost, and how much is accepted, is carried from answer to answer.
        if strategy not in self._controls:
            drafted = 0 if alone or strategy.method == "plain" else _LONGEST_DRAFT
            self._controls[strategy] = Adaptive(drafted, _LONGEST_LOOKUP if strategy.lookup else 0)
        return self._controls[strategy]

    def _rule(self, strategy: Strategy) -> Rule:
        if strategy.verification == "compare":
            return Compare()
        trie = self.trie(strategy.method, splits=strategy.splits)
        return Walk(trie) if strategy.verification == "trie" else Paper(trie)

    def _new_drafter(self, strategy: Strategy, sampler: Sampler | None) -> Drafter | None:
        if strategy.method in ("plain", "lookup"):
            return None
        if self.drafter is None or self._draft_session is None or self.alignment is None:
            raise OptionError(f"method {strategy.method!r} needs a drafter; load one with drafter=...")
        newest, stop = self.drafter, None
        if self.learner:
            newest, stop = self.learner.drafter, self.learner.stop()
        if newest is not self._drafting:  # a KV cache of older weights is fed again
            self._drafting = newest
            self._draft_session = newest.session()
        if strategy not in self._translators:
            self._translators[strategy] = self._translator(strategy, self.alignment)
        translator = self._translators[strategy]
        return Drafter(self._draft_session, translator, self.drafter.context_length, sampler, stop)

    def _translator(self, strategy: Strategy, alignment: Alignment) -> Translator:
        if strategy.method == "text":
            return TextTranslator(alignment)
        return SymbolTranslator(
            self.trie(strategy.method, splits=strategy.splits),
            walk=strategy.verification == "trie",
            grow=strategy.method == "ngram",
        )


def _observed(
    steps: Iterator[Step], learner: Learner, prompt: Sequence[int], temperature: float
) -> Iterator[Step]:
    with learner.request(prompt, temperature) as tracer:
        for step in steps:
            if tracer:
                tracer.add(step)
            yield step
