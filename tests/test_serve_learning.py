"""Learning from what is asked: by profile, never against a request's will, forgotten on request, through a crash."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("peft")

from learning_drafter import write_drafter
from serving import TARGET, plain, served
from toy import ToyModel

from omnidraft import OmniDraft
from omnidraft.backends.huggingface import HuggingFaceModel
from omnidraft.errors import ProfileError
from omnidraft.learn.profile import ProfileKey, ProfileStore

OTHER = ToyModel(TARGET.vocab, name="other", seed=1)
PROMPTS = ["the flake", "then the lake was", "a stone", "by the water", "the bird", "in the evening"] * 3


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceModel:
    folder = write_drafter(tmp_path_factory.mktemp("drafter"))
    return HuggingFaceModel(folder, name="tiny", precision="float32")


def profile_of(up: Any, name: str) -> dict[str, Any]:
    [found] = up.http.get(f"/v1/omnidraft/profiles/{name}").json()["profiles"]
    return found


@pytest.mark.parametrize("when", ["between", "idle"])
def test_answers_stay_the_same_while_the_drafter_learns(
    when: str, drafter: HuggingFaceModel, tmp_path: Path
) -> None:
    store = ProfileStore(tmp_path)
    with served(lambda name: OmniDraft(TARGET, drafter), store, learn=when) as up:
        for prompt in PROMPTS:
            answer = up.ask(prompt, max_tokens=20).json()
            assert answer["choices"][0]["message"]["content"] == plain(prompt, max_tokens=20)
        up.settled(lambda: profile_of(up, "default")["updates"] > 0)
        account = profile_of(up, "default")
        assert account["answers"] == len(PROMPTS)
        assert "omnidraft_learning_updates_total{" in up.http.get("/metrics").text
    saved = store.open(store.find("default").key)
    assert saved.problem is None
    assert saved.document("statistics")["answers"] == len(PROMPTS)


def test_a_request_can_keep_itself_out_of_learning(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    with served(lambda name: OmniDraft(TARGET, drafter), ProfileStore(tmp_path), learn="idle") as up:
        with up.http.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": True},
        ) as response:
            response.read()
        for stream in (False, True):
            up.ask("the flake", max_tokens=9, omnidraft={"learn": False}, stream=stream)
        up.settled(lambda: not up.server.worker.running)
        assert profile_of(up, "default")["answers"] == 1


def test_profiles_are_chosen_by_header_or_user_and_forgotten(
    drafter: HuggingFaceModel, tmp_path: Path
) -> None:
    store = ProfileStore(tmp_path)
    with served(lambda name: OmniDraft(TARGET, drafter), store, learn="idle", profiles=2) as up:

        def ask(header: str | None = None, **body: Any) -> httpx.Response:
            headers = {"X-OmniDraft-Profile": header} if header else {}
            body |= {"messages": [{"role": "user", "content": "the flake"}], "max_tokens": 9}
            return up.http.post("/v1/chat/completions", json=body, headers=headers)

        assert ask("anna").status_code == ask(user="ben").status_code == 200
        assert ask("anna", user="ben").status_code == 200
        assert profile_of(up, "anna")["answers"] == 2
        assert profile_of(up, "ben")["answers"] == 1
        assert ask("carl").status_code == 200  # the third: the one unused for longest is closed, and saved
        assert not profile_of(up, "ben")["open"]
        assert profile_of(up, "ben")["saved"]
        for bad in ("../x", ".", "a/b", "x" * 65):
            refused = ask(bad)
            assert refused.status_code == 400, bad
            assert refused.json()["error"]["code"] == "profile_error"
        assert ask(user="a/b").status_code == 400

        for name in ("anna", "ben"):
            gone = up.http.delete(f"/v1/omnidraft/profiles/{name}")
            assert gone.json() == {"name": name, "deleted": True}
            assert up.http.get(f"/v1/omnidraft/profiles/{name}").status_code == 404
            assert up.http.delete(f"/v1/omnidraft/profiles/{name}").status_code == 404
        left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
        assert not [path for path in left if "carl" not in path.parts]
        assert not any(
            slot.model.cached(TARGET.encode("the flake"))
            for slot in up.server.targets.get("").slots
            if not slot.busy
        )
        assert ask("anna").status_code == 200
        assert profile_of(up, "anna")["answers"] == 1
    assert {info.key.name for info in store.profiles()} == {"anna", "carl"}


def test_as_many_profiles_stay_open_as_may(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    with served(
        lambda name: OmniDraft(TARGET, drafter), ProfileStore(tmp_path), learn="idle", profiles=4
    ) as up:
        for user in ("anna", "ben", "carl", "dora", "emil"):
            assert up.ask("the flake", max_tokens=5, user=user).status_code == 200
        up.settled(lambda: not up.server.worker.running)
        assert [name for _, name in up.server.profiles.learners] == ["ben", "carl", "dora", "emil"]


def test_a_profile_that_cannot_be_saved_stops_no_other(
    drafter: HuggingFaceModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProfileStore(tmp_path)
    save = store.save

    def full(key: ProfileKey, parts: Any) -> int:
        if key.name == "anna":
            raise ProfileError("the disk is full")
        return save(key, parts)

    store.save = full  # type: ignore[method-assign]
    with contextlib.ExitStack() as ending:
        up = ending.enter_context(
            served(
                lambda name: OmniDraft(TARGET if name == "target" else OTHER, drafter),
                store,
                learn="idle",
                profiles=2,
            )
        )

        def ask(user: str, model: str = "target") -> int:
            return up.ask("the flake", max_tokens=5, user=user, model=model).status_code

        assert (ask("anna"), ask("ben"), ask("carl", "other")) == (200, 200, 200)
        assert "the disk is full" in caplog.text
        assert ask("anna") == 200
        assert up.http.delete("/v1/omnidraft/profiles/anna").status_code == 404  # it never was on disk
        assert ask("anna") == 200
        with pytest.raises(ProfileError, match="the disk is full"):
            ending.close()
    assert {info.key.name for info in store.profiles() if info.version} == {"ben", "carl"}


def test_a_user_is_no_profile_while_nobody_learns(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    """OpenAI's clients send who their user is, in whatever form they like."""
    with served(lambda name: OmniDraft(TARGET, drafter), ProfileStore(tmp_path)) as up:
        assert up.ask("the flake", max_tokens=5, user="anna@example.com").status_code == 200
        assert not up.server.profiles.learners


def test_profiles_are_not_made_without_end(
    drafter: HuggingFaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnidraft.serve.profiles._MOST", 1)
    with served(
        lambda name: OmniDraft(TARGET, drafter), ProfileStore(tmp_path), learn="idle", profiles=1
    ) as up:
        up.server.profiles._limit = 0  # each is closed, and so saved, when another comes
        assert up.ask("the flake", max_tokens=5, user="anna").status_code == 200
        assert up.ask("the flake", max_tokens=5, user="ben").status_code == 200
        refused = up.ask("the flake", max_tokens=5, user="carl")
        assert refused.status_code == 400
        assert "there are 1 profiles" in refused.json()["error"]["message"]
        assert up.ask("the flake", max_tokens=5, user="anna").status_code == 200


def test_forgetting_waits_for_answers_under_way(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    with served(lambda name: OmniDraft(TARGET, drafter), ProfileStore(tmp_path), learn="idle") as up:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(up.ask("the flake", max_tokens=400)))
        asking.start()
        up.settled(lambda: up.server.worker.running == 1)
        assert up.http.delete("/v1/omnidraft/profiles/default").status_code == 200
        asking.join()
        assert answers[0].json()["choices"][0]["message"]["content"] == plain("the flake", max_tokens=400)
        assert up.http.get("/v1/omnidraft/profiles").json() == {"profiles": []}


def test_learning_waits_for_every_profiles_answers(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    with served(lambda name: OmniDraft(TARGET, drafter), ProfileStore(tmp_path), learn="idle") as up:
        up.ask("the flake", max_tokens=9, user="anna")
        up.settled(lambda: not up.server.worker.running)
        [anna] = up.server.profiles.learners.values()
        asking = threading.Thread(target=lambda: up.ask("a stone", max_tokens=600, user="ben"))
        asking.start()
        up.settled(lambda: up.server.worker.running == 1)
        assert anna._asked
        asking.join()
        up.settled(lambda: not anna._asked)


# The crash


@contextlib.contextmanager
def process(folder: Path, home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, str(Path(__file__).with_name("learning_drafter.py")), str(folder)]
    environment = os.environ | {"OMNIDRAFT_HOME": str(home)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def asked(url: str, prompt: str) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 9, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return str(answer.json()["choices"][0]["message"]["content"])


def test_kill_9_during_learning_under_load(tmp_path: Path) -> None:
    folder, home = write_drafter(tmp_path / "drafter"), tmp_path / "home"
    store = ProfileStore(home / "profiles")

    def load(prompt: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                assert asked(url, prompt) == plain(prompt, max_tokens=9)

    with process(folder, home) as (child, url):
        threads = [threading.Thread(target=load, args=(prompt,)) for prompt in PROMPTS[:4]]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 100
        while not (found := store.profiles()) or found[0].version < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    profile = store.open(store.profiles()[0].key)
    assert profile.problem is None
    updates = profile.document("statistics")["updates"]
    assert updates > 0

    with process(folder, home) as (child, url):  # it goes on at once, from what was learned
        assert asked(url, "a") == plain("a", max_tokens=9)
        [known] = httpx.get(f"{url}/v1/omnidraft/profiles").json()["profiles"]
        assert known["updates"] >= updates
        assert known["problem"] is None
        answers = known["answers"]
        asked(url, "the flake")
        child.send_signal(signal.SIGTERM)  # and an orderly end saves what came last
        assert child.wait(60) == 0
    assert store.open(store.profiles()[0].key).document("statistics")["answers"] == answers + 1
