"""The one thread that touches the models: answers take turns there, one step or one part of a prompt each."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from omnidraft.answers import Stream
from omnidraft.decode import Chunk
from omnidraft.errors import OmniDraftError
from omnidraft.options import Options
from omnidraft.serve.errors import ApiError, as_api_error
from omnidraft.serve.logprobs import TokenLogprob, logprobs_of
from omnidraft.serve.profiles import Profiles
from omnidraft.serve.targets import Slot, Target
from omnidraft.stats import Stats

if TYPE_CHECKING:
    from omnidraft.learn.learner import Learner

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shown:
    """What one step adds to an answer."""

    chunk: Chunk
    logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer is whole."""

    reason: str
    stats: Stats
    prompt: int  # tokens
    cached: int  # of them, found in a KV cache


@dataclass(frozen=True, slots=True)
class Failed:
    """An answer ends with an error."""

    error: ApiError


Event = Shown | Finished | Failed


@dataclass(eq=False)
class Job:
    """One answer to make. `emit` is called in the worker's thread; `deadline` is by `time.monotonic`."""

    target: Target
    prompt: Sequence[int]
    options: Options
    emit: Callable[[Event], None]
    deadline: float
    profile: str | None = None
    learns: bool = True
    top_logprobs: int | None = None  # None: no logprobs
    cancelled: bool = False  # set by whoever asked, at any time
    asked: float = field(default_factory=time.monotonic)


class _Answer:
    """A job under way."""

    def __init__(self, job: Job, slot: Slot, learner: Learner | None, part: int) -> None:
        self.job, self.slot, self.learner = job, slot, learner
        slot.model.follow(learner)
        self.cached = slot.model.cached(job.prompt)
        self.prefill = slot.model.prefill(job.prompt, job.options, part)
        self.stream: Stream = slot.model.answer(job.prompt, job.options)
        self.chunks: Iterator[Chunk] = self.stream.chunks()

    def observed(self) -> contextlib.AbstractContextManager[None]:
        """Around each turn: whether the learner looks on."""
        if self.learner and not self.job.learns:
            return self.learner.paused()
        return contextlib.nullcontext()


@dataclass(eq=False)
class _Errand:
    """Work between turns, while no answer of a profile is under way."""

    work: Callable[[], Any]
    profile: str | None
    done: Future[Any] = field(default_factory=Future)


class Worker:
    """The queue and its thread."""

    def __init__(self, profiles: Profiles, *, slots: int, queue: int, part: int) -> None:
        self.profiles = profiles
        self.capacity = slots + queue
        self._slots = slots
        self._part = part
        self._queue: list[Job] = []
        self._answers: list[_Answer] = []
        self._errands: list[_Errand] = []
        self._reserved = 0
        self._seconds = 1.0  # that an answer has taken lately
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="omnidraft-worker", daemon=True)
        self._thread.start()

    # What other threads call

    def reserve(self, count: int) -> None:
        """Take `count` places, to be given back by `release`.

        Raises:
            ApiError: all are taken (429), or the server stops (503).
        """
        with self._changed:
            if self._closing:
                raise ApiError(503, "the server is stopping")
            if self._reserved + count > self.capacity:
                wait = self._seconds * max(1, len(self._queue)) / self._slots
                headers = {"Retry-After": str(min(60, max(1, math.ceil(wait))))}
                raise ApiError(429, "all places are taken; try again later", headers=headers)
            self._reserved += count

    def release(self, count: int) -> None:
        """Give places back."""
        with self._changed:
            self._reserved -= count

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, whose places are reserved.

        Raises:
            ApiError: the server stops (503).
        """
        with self._changed:
            if self._closing:
                raise ApiError(503, "the server is stopping")
            self._queue += jobs
            self._changed.notify()

    def between(self, work: Callable[[], Any], profile: str | None = None) -> Future[Any]:
        """Run `work` in the worker's thread, when no answer of `profile` is under way; later ones wait for it."""
        errand = _Errand(work, profile)
        with self._changed:
            if self._closing:
                raise ApiError(503, "the server is stopping")
            self._errands.append(errand)
            self._changed.notify()
        return errand.done

    @property
    def running(self) -> int:
        """Answers under way."""
        return len(self._answers)

    @property
    def waiting(self) -> int:
        """Answers in the queue."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self._thread.is_alive() and not self._closing

    def close(self) -> None:
        """Stop; answers under way and in the queue fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._queue or self._answers or self._errands)
                if self._closing:
                    break
            self._run_errands()
            self._begin()
            for answer in list(self._answers):
                self._guarded(answer.job, partial(self._turn, answer), answer)
            if not self._answers:
                self.profiles.let_go()
        stopping = Failed(ApiError(503, "the server is stopping"))
        for answer in list(self._answers):
            self._emit(answer.job, stopping)
            self._drop(answer)
        for job in self._queue:
            self._emit(job, stopping)
        for errand in self._errands:
            if errand.done.set_running_or_notify_cancel():
                errand.done.set_exception(ApiError(503, "the server is stopping"))
        self.profiles.let_go()

    def _run_errands(self) -> None:
        for errand in list(self._errands):
            if errand.profile is not None and any(a.job.profile == errand.profile for a in self._answers):
                continue
            with self._changed:
                self._errands.remove(errand)
            if not errand.done.set_running_or_notify_cancel():
                continue
            try:
                errand.done.set_result(errand.work())
            except Exception as error:
                errand.done.set_exception(error)

    def _begin(self) -> None:
        """Take jobs from the queue, first come first served, while there are slots."""
        blocked = {errand.profile for errand in self._errands}
        for job in list(self._queue):
            expired = time.monotonic() > job.deadline
            if not (job.cancelled or expired):
                if len(self._answers) >= self._slots:
                    continue
                if job.profile is not None and job.profile in blocked:
                    continue
            with self._changed:
                self._queue.remove(job)
            if job.cancelled:
                job.target.counters.finished["cancelled"] += 1
                continue
            if expired:
                job.target.counters.finished["timeout"] += 1
                self._emit(job, _late())
                continue
            if not self._answers:
                self.profiles.hold()
            self._guarded(job, partial(self._start, job))

    def _start(self, job: Job) -> None:
        in_use = {(a.job.target.name, a.job.profile) for a in self._answers if a.job.profile}
        learner = self.profiles.open(job.target, job.profile, in_use)
        slot = job.target.take(job.prompt, self._slots)
        try:
            answer = _Answer(job, slot, learner, self._part)
        except BaseException:
            slot.busy = False
            raise
        job.target.counters.begin(len(job.prompt), answer.cached)
        self._answers.append(answer)

    def _turn(self, answer: _Answer) -> None:
        """One step of an answer, or one part of its prompt."""
        job = answer.job
        if job.cancelled:
            job.target.counters.finished["cancelled"] += 1
            return self._drop(answer)
        if time.monotonic() > job.deadline:
            job.target.counters.finished["timeout"] += 1
            self._emit(job, _late())
            return self._drop(answer)
        with answer.observed():
            for _ in answer.prefill:
                return None
            for chunk in answer.chunks:
                self._show(answer, chunk)
                if chunk.stopped or (answer.stream.complete and not job.options.stop):
                    break  # nothing is held back
                return None
            self._finish(answer)
            try:
                for _ in answer.chunks:  # here it is learned from, when the client has its answer
                    pass
            except Exception:
                _log.exception("an answer could not be learned from")
                answer.slot.model.reset()
        return self._drop(answer)

    def _show(self, answer: _Answer, chunk: Chunk) -> None:
        job, step, counters = answer.job, chunk.step, answer.job.target.counters
        if job.cancelled:
            return
        logprobs: list[TokenLogprob] = []
        if step:
            if job.top_logprobs is not None:
                logprobs = logprobs_of(step, job.target.model.target.vocab, job.top_logprobs)
            first = answer.stream.stats.steps == 1
            counters.add(step, first)
            if first:
                counters.first_token.add(time.monotonic() - job.asked)
        self._emit(job, Shown(chunk, logprobs))

    def _finish(self, answer: _Answer) -> None:
        job, reason = answer.job, answer.stream.finish_reason
        seconds = time.monotonic() - job.asked
        job.target.counters.finished[reason] += 1
        job.target.counters.whole.add(seconds)
        self._seconds += 0.2 * (seconds - self._seconds)
        self._emit(job, Finished(reason, answer.stream.stats, len(job.prompt), answer.cached))

    def _guarded(self, job: Job, work: Callable[[], None], answer: _Answer | None = None) -> None:
        """An error ends one answer, and no other."""
        try:
            work()
        except Exception as error:
            if isinstance(error, ApiError):
                failure = error
            elif isinstance(error, OmniDraftError):
                failure = as_api_error(error)
            else:
                _log.exception("an answer failed")
                failure = ApiError(500, "the server failed; its log says more")
            job.target.counters.finished["error"] += 1
            self._emit(job, Failed(failure))
            if answer:
                self._drop(answer)
                answer.slot.model.reset()

    def _drop(self, answer: _Answer) -> None:
        if answer not in self._answers:
            return
        self._answers.remove(answer)
        answer.slot.busy = False
        with answer.observed():
            del answer.prefill, answer.chunks, answer.stream  # what was said so far is learned from

    def _emit(self, job: Job, event: Event) -> None:
        try:
            job.emit(event)
        except RuntimeError:  # the event loop is gone, and the client with it
            job.cancelled = True


def _late() -> Failed:
    return Failed(ApiError(504, "the request took too long; ask for fewer tokens, or try again later"))
