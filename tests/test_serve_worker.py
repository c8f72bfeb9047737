"""Turns, queue, cancellation and conversations: what the worker promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from serving import DRAFTER, TARGET, Slow, plain, served
from toy import ToyModel

from omnidraft import OmniDraft
from omnidraft.options import make_options
from omnidraft.serve.profiles import Profiles
from omnidraft.serve.settings import Settings
from omnidraft.serve.targets import Targets
from omnidraft.serve.worker import Event, Finished, Job, Shown, Worker


class Log:
    """A worker without HTTP, and what it emitted, in order."""

    def __init__(self, model: OmniDraft, *, slots: int, part: int = 256) -> None:
        targets = Targets(["target"], lambda name: model)
        self.target = targets.get("")
        self.events: list[tuple[str, Event]] = []
        self.whole: set[str] = set()
        self.worker = Worker(Profiles(Settings(("target",)), targets), slots=slots, queue=64, part=part)

    def job(self, name: str, tokens: int, prompt: str = "the flake", **options: Any) -> Job:
        def emit(event: Event) -> None:
            self.events.append((name, event))
            if not isinstance(event, Shown):
                self.whole.add(name)

        encoded = TARGET.encode(prompt)
        return Job(
            self.target, encoded, make_options(max_tokens=tokens, **options), emit, time.monotonic() + 60
        )

    def run(self, jobs: list[Job], names: set[str]) -> list[tuple[str, Event]]:
        self.worker.submit(jobs)
        until = time.monotonic() + 60
        while self.whole < names:
            assert time.monotonic() < until
            time.sleep(0.005)
        self.worker.close()
        return self.events


@pytest.mark.parametrize("slots", [1, 2])
def test_a_short_answer_starts_within_two_steps_of_a_free_slot(slots: int) -> None:
    log = Log(OmniDraft(TARGET, DRAFTER), slots=slots)
    events = log.run([log.job("long", 512), log.job("short", 16)], {"long", "short"})
    free = 0 if slots == 2 else next(i for i, (_, e) in enumerate(events) if isinstance(e, Finished)) + 1
    begins = next(i for i, (name, _) in enumerate(events) if name == "short")
    assert begins - free <= 2
    if slots == 2:  # and does not wait for the long one
        ends = next(i for i, (name, e) in enumerate(events) if name == "short" and isinstance(e, Finished))
        assert ends <= 2 * 17


def test_answers_take_turns_step_by_step() -> None:
    log = Log(OmniDraft(TARGET, DRAFTER), slots=3)
    names = ["a", "b", "c"]
    events = log.run([log.job(name, 60, method="plain") for name in names], set(names))
    order = [name for name, event in events if isinstance(event, Shown)]
    assert order == names * 60


def test_a_long_prompt_is_fed_in_parts_between_the_steps_of_others() -> None:
    log = Log(OmniDraft(TARGET, DRAFTER), slots=2, part=50)
    prompt = "the flake fell; " * 60
    turns = 2 * len(TARGET.encode(prompt)) // 50
    events = log.run([log.job("long", 5, prompt), log.job("short", 60, method="plain")], {"long", "short"})
    begins = next(i for i, (name, _) in enumerate(events) if name == "long")
    assert begins >= turns // 3
    text = "".join(e.chunk.text for name, e in events if name == "long" and isinstance(e, Shown))
    assert text == plain(prompt, max_tokens=5)
    sessions = [log.target.slots[0].model._target_session, log.target.slots[0].model._draft_session]
    assert max(max(session.passes) for session in sessions) <= 51


def test_a_conversation_finds_its_kv_cache_again() -> None:
    with served(slots=3) as up:
        talks: list[list[dict[str, str]]] = [[], [], []]
        before = [0, 0, 0]
        for turn in range(3):
            for i, messages in enumerate(talks):
                said = (
                    f"{i} the lake was still there; {turn} a stone lay by the water, and a bird stood on it"
                )
                messages.append({"role": "user", "content": said})
                body = {"messages": messages, "temperature": 0, "max_tokens": 20}
                answer = up.http.post("/v1/chat/completions", json=body).json()
                text = answer["choices"][0]["message"]["content"]
                assert text == OmniDraft(TARGET, None).generate(messages, max_tokens=20).text
                messages.append({"role": "assistant", "content": text})
                usage = answer["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= before[i]
                before[i] = usage["prompt_tokens"] - 1  # its last character may be spelled with what follows
        assert len(up.server.targets.get("").slots) == 3


def test_of_a_known_prefix_of_a_thousand_tokens_nothing_is_fed_again() -> None:
    with served(slots=1) as up:

        def fed(messages: list[dict[str, str]]) -> list[int]:
            """Tokens that went through each model for the first token of an answer."""
            sessions = [slot.model._target_session for slot in up.server.targets.get("").slots]
            sessions += [slot.model._draft_session for slot in up.server.targets.get("").slots]
            before = [sum(session.passes) for session in sessions] or [0, 0]
            body = {"messages": messages, "max_tokens": 1, "temperature": 0}
            assert up.http.post("/v1/chat/completions", json=body).status_code == 200
            [slot] = up.server.targets.get("").slots
            sessions = [slot.model._target_session, slot.model._draft_session]
            return [sum(session.passes) - b for session, b in zip(sessions, before, strict=True)]

        chat = [{"role": "user", "content": "the flake fell; the lake was still. " * 120}]
        cold = fed(chat)
        chat += [{"role": "assistant", "content": " and"}, {"role": "user", "content": "then?"}]
        warm = fed(chat)
        assert cold[0] >= 1000
        assert warm[0] <= cold[0] / 50
        assert warm[1] <= max(cold[1] / 50, 20)


def test_concurrent_answers_are_not_mixed_up() -> None:
    prompts = [f"{i} the flake fell; the lake" for i in range(12)]
    with served(slots=4) as up, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda text: up.ask(text, max_tokens=40).json(), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["message"]["content"] == plain(prompt, max_tokens=40)


def test_a_full_queue_says_when_to_come_back() -> None:
    with served(lambda name: OmniDraft(Slow(0.02), DRAFTER), slots=1, queue=1) as up:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: up.ask("the flake", max_tokens=20), range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert up.ask("the flake", max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(stream: bool) -> None:
    with served(lambda name: OmniDraft(Slow(0.01), DRAFTER), slots=1) as up:
        request = {
            "messages": [{"role": "user", "content": "the flake"}],
            "max_tokens": 3000,
            "stream": stream,
        }
        with up.connected() as client:
            client.sendall(up.post(request))
            up.settled(lambda: up.server.worker.running == 1)
            if stream:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        counters = up.server.targets.get("").counters
        up.settled(lambda: counters.finished["cancelled"] == 1)
        assert up.ask("a stone", max_tokens=20).json()["choices"][0]["message"]["content"] == plain(
            "a stone", max_tokens=20
        )
        up.settled(lambda: up.server.worker._reserved == 0)


def test_a_request_that_takes_too_long_is_ended() -> None:
    with served(lambda name: OmniDraft(Slow(0.02), DRAFTER), slots=1, timeout=0.5) as up:
        late = threading.Thread(target=up.ask, args=("x",), kwargs={"max_tokens": 2000})
        late.start()
        time.sleep(0.1)
        waiting = up.ask("the flake", max_tokens=20)
        late.join()
        assert waiting.status_code == 504
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "stream": True}
        with up.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        assert '"timeout_error"' in lines[-2]
        assert lines[-1] == "data: [DONE]"


class Failing(ToyModel):
    """Gives NaN after a certain text."""

    def row(self, context: Any) -> Any:
        row = super().row(context)
        return row * float("nan") if self.vocab.decode(context).startswith(b"bad") else row


def test_an_answer_that_fails_takes_no_other_with_it() -> None:
    def load(name: str) -> OmniDraft:
        return OmniDraft(Failing(TARGET.vocab, name="target", seed=1), DRAFTER)

    with served(load) as up:
        with ThreadPoolExecutor(6) as pool:
            prompts = ["the flake", "bad", "a stone", "bad"] * 2
            answers = list(pool.map(lambda text: up.ask(text, max_tokens=30), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            if prompt == "bad":
                assert answer.status_code == 500
                assert "NaN or infinite logits" in answer.json()["error"]["message"]
            else:
                assert answer.json()["choices"][0]["message"]["content"] == plain(prompt, max_tokens=30)


def test_a_client_that_leaves_the_queue_is_counted() -> None:
    log = Log(OmniDraft(TARGET, DRAFTER), slots=1)
    gone = log.job("gone", 5)
    gone.cancelled = True
    log.run([gone, log.job("a", 5)], {"a"})
    assert log.target.counters.finished == {"cancelled": 1, "length": 1}


def test_an_answer_that_cannot_be_learned_from_was_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = OmniDraft.answer

    def spoiled(chunks: Iterator[Any]) -> Iterator[Any]:
        yield from chunks
        raise MemoryError

    def answered(self: OmniDraft, *given: Any) -> Any:
        stream = answer(self, *given)
        stream._chunks = spoiled(stream._chunks)
        return stream

    monkeypatch.setattr(OmniDraft, "answer", answered)
    log = Log(OmniDraft(TARGET, DRAFTER), slots=1)
    events = log.run([log.job("a", 5), log.job("b", 5)], {"a", "b"})
    assert "could not be learned from" in caplog.text
    assert log.target.counters.finished == {"length": 2}
    assert [type(event) for _, event in events].count(Finished) == 2


def test_an_errand_that_nobody_waits_for_harms_nobody() -> None:
    log = Log(OmniDraft(TARGET, DRAFTER), slots=1)
    begun, go = threading.Event(), threading.Event()
    first = log.worker.between(lambda: (begun.set(), go.wait(30)))
    begun.wait(30)
    second = log.worker.between(lambda: None)
    assert second.cancel()
    go.set()
    first.result(30)
    log.run([log.job("a", 5)], {"a"})
    assert isinstance(log.events[-1][1], Finished)


def test_stopping_ends_answers_with_an_error() -> None:
    asking: list[httpx.Response] = []
    with served(lambda name: OmniDraft(Slow(0.02), DRAFTER), slots=1) as up:
        thread = threading.Thread(target=lambda: asking.append(up.ask("x", max_tokens=2000)))
        thread.start()
        up.settled(lambda: up.server.worker.running == 1)
        up.server.worker.close()
        thread.join()
        assert asking[0].status_code == 503
        assert up.http.get("/ready").status_code == 503
        assert up.ask("x").status_code == 503
