"""Learning from a user's own traffic: answers in, a better drafter out; between requests, or while nothing is asked.

An update never changes a step in progress: it makes another Model over the same weights, which the next request
drafts with, its KV cache fed again.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from omnidraft.drafting import Stop
from omnidraft.errors import MissingExtraError, NGramFileError, OptionError, ProfileError
from omnidraft.hub import weights_fingerprint
from omnidraft.learn.account import Account
from omnidraft.learn.guard import Guard
from omnidraft.learn.head import Head, HeadTrainer
from omnidraft.learn.profile import Arrays, Document, Part, Profile, ProfileKey, ProfileStore
from omnidraft.learn.replay import Replay, pack, unpack
from omnidraft.learn.settings import Learning, When
from omnidraft.learn.traces import Trace, Tracer
from omnidraft.learn.trainer import Trainer, Training, adapter_document
from omnidraft.learn.updates import Update
from omnidraft.lookup import END, History
from omnidraft.ngrams import Trie
from omnidraft.session import Model

_REPLAY = 64 << 20  # bytes
_HISTORY = 1 << 17  # tokens, 2 MB

_log = logging.getLogger(__name__)


class Adaptable(Model, Protocol):
    """A drafter that can be adapted: `adapted` gives another Model over the same weights."""

    folder: Any
    config: Any

    def adapted(self, adapter: Any, scale: float = 1.0) -> Model:
        """See `omnidraft.backends.huggingface.HuggingFaceModel.adapted`."""


class Learner:
    """One profile that learns: which Model drafts now, and what was seen since."""

    def __init__(
        self,
        drafter: Adaptable,
        trie: Trie,  # the pair's, with every n-gram
        learning: Learning,
        *,
        store: ProfileStore | None = None,
        key: ProfileKey | None = None,
        on_update: Callable[[Update], None] = lambda update: None,
    ) -> None:
        """`store` and `key`: where to go on from, and to save; without them all is forgotten at the end."""
        self.learning = learning
        self.account = Account()
        self.drafter: Model = drafter
        self.head: Head | None = None  # asked during drafts
        self.problem: str | None = None  # with the profile, in words
        self.documents: dict[str, Any] = {}  # kept with the profile for whoever runs the learner: JSON
        self.on_update = on_update
        self.ngrams = Trie(trie.lexicon)  # of this profile alone
        self.history = History(_HISTORY)  # the answers, for look-ups
        self._base = drafter
        self._target_width = trie.lexicon.alignment.target.width
        self._trie = trie
        self._store, self._key = store, key
        self._trainer: Trainer | None = None
        self._fresh: list[Trace] = []  # seen, and not trained on yet
        self._replay = Replay(_REPLAY)
        self._drawn = random.Random(learning.training.seed)
        self._guard = Guard()
        self._adapter: dict[str, Any] = {}
        self._optimizer: dict[str, Any] = {}
        self._started = perf_counter()
        self._earlier_seconds = 0.0  # of learning, in the profile's earlier runs: not of this one's budget
        self._update_seconds = 0.0  # of the last update
        self._turn = threading.Condition()
        self._updating = threading.Lock()
        self._asked = 0  # requests under way
        self._pauses = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._claim = contextlib.ExitStack()
        if store and key:
            if learning.when != "off":  # two that learn into one profile would undo each other's work
                self._claim.enter_context(store.claim(key))
            self._restore(store.open(key))
        if self.head is None and learning.training.head != "off":
            self._keep_head(HeadTrainer(_hidden_size(drafter)).weights())
        if learning.when == "idle":
            self._thread = threading.Thread(target=self._idle, name="omnidraft-learning", daemon=True)
            self._thread.start()

    # What a request does

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is learned from what is asked meanwhile."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextlib.contextmanager
    def request(self, prompt: Sequence[int], temperature: float = 0.0) -> Iterator[Tracer | None]:
        """Around one answer: its Steps go into the tracer. None when nothing is learned.

        `temperature`: that drafts are drawn at, for a rule that knows their law; 0: each token is the likeliest.
        """
        if self.learning.when == "off" or self._pauses or self._closing:
            yield None
            return
        tracer = Tracer(self._trie, prompt, temperature)
        try:
            with self.waiting():
                try:
                    yield tracer
                finally:
                    start = perf_counter()
                    with self._turn:
                        self.history.add(tracer.tokens)
                    self._take(tracer)
                    self.account.seconds += perf_counter() - start
        except GeneratorExit:
            # A stop string was reached, or the reader has enough: it was an answer all the same.
            self._between()
            raise
        self._between()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Learning in the background waits meanwhile."""
        with self._turn:
            self._asked += 1
        try:
            yield
        finally:
            with self._turn:
                self._asked -= 1
                self._turn.notify_all()

    def _take(self, tracer: Tracer) -> None:
        trace = tracer.trace()
        account = self.account
        if trace is None:
            account.untraced += 1
            return
        account.answers += 1
        account.positions += len(trace.positions)
        account.skipped_positions += int(trace.skipped[0])
        if account.answers % self.learning.held_out == 0:
            account.held_out += 1
            # A trainer in the background waits until no request is under way: to ask it here would wait for ever.
            judge = self._trainer if self.learning.when == "between" else None
            with self._turn:
                self._guard.keep(trace, judge)
            return
        with self._turn:
            self._fresh.append(trace)
            self._replay.add(trace)
            del self._fresh[: -len(self._replay)]  # answers may come faster than the budget lets learn

    def _between(self) -> None:
        if self.learning.when != "between" or not self._updating.acquire(blocking=False):
            return  # another thread's answer has ended too, and is learned from already
        try:
            while self._ready() and self._affordable():
                self.update()
        finally:
            self._updating.release()

    def _affordable(self) -> bool:
        """Whether the budget has room for one more update like the last."""
        seconds = self.account.seconds - self._earlier_seconds + self._update_seconds
        return seconds <= self.learning.budget * (perf_counter() - self._started)

    def _idle(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._closing or (not self._asked and self._ready()))
                if self._closing:
                    return
            try:
                self.update()
            except Exception:
                _log.exception("learning has stopped; answers are not affected")
                return

    def _ready(self) -> bool:
        return len(self._fresh) >= self.learning.training.batch and not self._guard.paused

    def _yield(self) -> None:
        """In the background: wait while a request is under way."""
        with self._turn:
            self._turn.wait_for(lambda: self._closing or not self._asked)
            if self._closing:
                raise _Closing

    # What learning does

    def update(self) -> Update | None:
        """One step of the drafter's optimiser, the head's, or both, on what was seen last; None when nothing was.

        An `interleaved` head takes its step on answers drawn from all that are kept.
        """
        training = self.learning.training
        with self._turn:
            batch = self._fresh[: training.batch]
            del self._fresh[: len(batch)]
            drawn = self._drawn.sample(list(self._replay), min(training.batch, len(self._replay)))
        if not batch:
            return None
        start = perf_counter()
        trainer = self._training()
        try:
            update = trainer.update(batch, drawn)
            spoiled = self._guard.objects(trainer)
        except _Closing:
            return None
        self.account.count(update)
        if spoiled:
            self.account.reverted += 1
            _log.warning("held-out answers were drafted worse: what was learned last is taken back")
        self._optimizer = trainer.optimizer()
        if update.loss is not None:
            self._adapter = trainer.weights()
            self.drafter = self._base.adapted(self._adapter)
        if update.head:
            self._keep_head(trainer.head.weights())
        self._update_seconds = perf_counter() - start
        self.account.seconds += self._update_seconds
        self.on_update(update)
        start = perf_counter()
        try:
            self.save()  # so a crash loses one update at most
        except ProfileError as error:  # a full disk is no reason not to answer, nor to stop learning
            _log.warning("%s", error)
        self.account.seconds += perf_counter() - start
        return update

    def stop(self) -> Stop | None:
        """What ends a draft early: the head, once there is one."""
        return Stop(self.head.chance, self.learning.gamma) if self.head else None

    def pretrain(self, traces: Sequence[Trace]) -> None:
        """Learn from answers recorded before (`omnidraft.learn.record`), in order, as if they were asked now."""
        batch = self.learning.training.batch
        for start in range(0, len(traces), batch):
            with self._turn:
                self._fresh += traces[start : start + batch]
                for trace in traces[start : start + batch]:
                    self._replay.add(trace)
            self.update()

    def _training(self) -> Trainer:
        if self._trainer is None:
            gate = self._yield if self.learning.when == "idle" else None
            self._trainer = Trainer(self._base.folder, self._trie.lexicon, self.learning.training, gate=gate)
            if self._adapter:
                self._trainer.load(self._adapter)
            if self.head:
                self._trainer.head.load(self.head.weights)
            self._trainer.load_optimizer(self._optimizer)
            self._guard.begin(self._trainer)
        return self._trainer

    @property
    def agreement(self) -> float | None:
        """The share of held-out answers' tokens that the newest adapter would have drafted; None before a look."""
        return self._guard.agreement

    def _keep_head(self, weights: Mapping[str, NDArray[Any]]) -> None:
        self.head = Head(weights, _hidden_size(self._base))

    # The profile

    def _restore(self, profile: Profile) -> None:
        """Go on from what is there; any part may be missing, and an imported one may be anything."""
        self.problem = profile.problem
        try:
            if "adapter_model" in profile:
                adapter = {name: np.array(a) for name, a in profile.arrays("adapter_model").items()}
                self.drafter = self._base.adapted(adapter)
                self._adapter = adapter
                # A profile keeps the rank that it began with.
                rank = min(len(a) for name, a in adapter.items() if ".lora_A." in name)
                training = replace(self.learning.training, rank=rank)
                self.learning = replace(self.learning, training=training)
            if "head" in profile:
                self._keep_head(profile.arrays("head"))
            if "optimizer" in profile:
                self._optimizer = {name: np.array(a) for name, a in profile.arrays("optimizer").items()}
            if "replay" in profile:
                self._replay = Replay(_REPLAY, unpack(profile.arrays("replay")))
            if "held_out" in profile:
                self._guard.traces.extend(unpack(profile.arrays("held_out")))
            if "history" in profile:
                self.history = _history(profile.arrays("history")["tokens"], self._target_width)
            if "ngrams" in profile:
                self.ngrams.insert_record(profile.document("ngrams"), f"profile {profile.key.name}")
            if "documents" in profile:
                self.documents = dict(profile.document("documents"))
            if "statistics" in profile:
                self.account = Account(**profile.document("statistics"))
                self._earlier_seconds = self.account.seconds
        except (OptionError, NGramFileError, ValueError, TypeError, KeyError) as error:
            self.problem = (
                f"a part of profile {profile.key} cannot be used ({error}); what came before it is, "
                "and the rest is learned anew"
            )

    def save(self) -> None:
        """Write the profile; does nothing without a store.

        Raises:
            ProfileError: it cannot be written; what was saved before stays.
        """
        if self._store is None or self._key is None:
            return
        with self._turn:  # a request may end meanwhile
            replay, held_out = pack(self._replay), pack(self._guard.traces)
            documents = copy.deepcopy(self.documents)
            history = np.array(self.history.tokens, np.int32)
        parts: dict[str, Part | None] = {
            "replay": Arrays(replay, text=True),
            "held_out": Arrays(held_out, text=True),
            "history": Arrays({"tokens": history}, text=True),
            # As they are now: a request may bring more while they are written down.
            "ngrams": Document(
                self.ngrams.snapshot().record(drafter=self._key.drafter, target=self._key.target)
            ),
            "statistics": Document(asdict(self.account)),
            "documents": Document(documents),
        }
        if self._adapter:
            parts |= {
                "adapter_model": Arrays(self._adapter),
                "adapter_config": Document(adapter_document(self._base.name, self.learning.training.rank)),
            }
        if self.head:
            parts["head"] = Arrays(self.head.weights)
        if self._optimizer:
            parts["optimizer"] = Arrays(self._optimizer)
        self._store.save(self._key, parts)

    def close(self) -> None:
        """Stop learning and save."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
        if self._thread:
            self._thread.join()
            self._thread = None
        with self._claim:
            if self.learning.when != "off":
                self.save()


def _hidden_size(drafter: Adaptable) -> int:
    size: int = drafter.config.get_text_config().hidden_size
    return size


def learning_of(when: str, budget: float, gamma: float, training: dict[str, Any]) -> Learning:
    """What `OmniDraft.learn` is asked for; errors as there, before anything is begun."""
    known = {field.name for field in fields(Training)}
    if unknown := training.keys() - known:
        raise OptionError(
            f"unknown option {', '.join(sorted(unknown))}; known are {', '.join(sorted(known | {'budget', 'gamma'}))}"
        )
    learning = Learning(cast(When, when), budget=budget, gamma=gamma, training=Training(**training))
    if not learning.training.rank:
        raise OptionError(
            "rank is 0, which trains all weights, and a drafter at work takes an adapter only; give 1 or more"
        )
    if when != "off" and find_spec("peft") is None:
        raise MissingExtraError("peft", "learn")
    return learning


def learner_for(
    drafter: Model,
    target: Model,
    trie: Trie,
    learning: Learning,
    profile: str | None,
    store: ProfileStore | None,
) -> Learner:
    """A Learner for a pair, going on from a profile if one is named. Errors as in `OmniDraft.learn`."""
    if not hasattr(drafter, "adapted"):
        raise OptionError(
            f"{drafter.name} runs on an engine that cannot be adapted; "
            "load it with drafter_engine='openvino' or 'transformers'"
        )
    if profile is None:
        return Learner(cast(Adaptable, drafter), trie, learning)
    key = ProfileKey(
        drafter.name,
        target.name,
        profile,
        drafter.vocab.fingerprint,
        target.vocab.fingerprint,
        weights_fingerprint(cast(Adaptable, drafter).folder),
    )
    return Learner(cast(Adaptable, drafter), trie, learning, store=store or ProfileStore(), key=key)


def _history(tokens: NDArray[Any], width: int) -> History:
    if (
        tokens.ndim != 1
        or tokens.dtype.kind != "i"
        or tokens.min(initial=0) < END
        or tokens.max(initial=0) >= width
    ):
        raise ValueError("history holds what are no tokens of the target")
    return History(_HISTORY, tokens.tolist())


class _Closing(Exception):
    """Raised inside an update in the background to end it."""
