"""Who may ask, how much, how slowly; and what a server refuses to begin with."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import plain, served

from omnidraft import cli
from omnidraft.errors import OptionError, ProfileError
from omnidraft.serve.settings import Settings

CHAT = {"messages": [{"role": "user", "content": "the flake"}], "max_tokens": 5, "temperature": 0}


def test_keys() -> None:
    with served(api_key="s3cret-ключ") as up:
        url = "/v1/models"
        for header in (None, "Bearer wrong", "Bearer", "s3cret", "Basic s3cret-ключ", "Bearer s3cret-ключ2"):
            headers = {} if header is None else {"Authorization": header.encode()}
            refused = up.http.get(url, headers=headers)
            assert refused.status_code == 401, header
            assert refused.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer s3cret-ключ".encode()}
        assert up.http.get(url, headers=right).status_code == 200
        paths = ["/v1/chat/completions", "/metrics", "/v1/omnidraft/status", "/openapi.json", "/nothing"]
        assert {up.http.get(path).status_code for path in paths} == {401}
        assert {up.http.get(path).status_code for path in ("/", "/health", "/ready")} == {200}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "0.0.0.0 can be reached by others; set an API key"),
        ({"host": "::"}, "can be reached by others"),
        ({"host": "example.org"}, "can be reached by others"),
        ({"targets": ()}, "no target"),
        ({"port": 70000}, "port is 70000"),
        ({"slots": 0}, "slots is 0"),
        ({"queue": -1}, "queue is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"learn": "always"}, "unknown learn 'always'"),
        ({"profile": "../x"}, "cannot be a profile's name"),
        ({"options": {"k": 99}}, "k is 99"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, ProfileError), match=message):
        Settings(**({"targets": ("target",)} | settings))
    assert Settings(("target",), host="0.0.0.0", api_key="x").slots == 4


def test_only_loopback_names_are_answered_and_no_other_site_may_read() -> None:
    with served() as up:
        port = up.url.rpartition(":")[2]
        for host, status in [
            (f"127.0.0.1:{port}", 200),
            ("localhost", 200),
            ("LocalHost", 200),
            (f"[::1]:{port}", 200),
            ("evil.example", 403),
            (f"evil.example:{port}", 403),
            ("", 403),
        ]:
            assert up.http.get("/v1/models", headers={"Host": host}).status_code == status, host
        asked = up.http.post("/v1/chat/completions", json=CHAT, headers={"Origin": "https://evil.example"})
        assert not [name for name in asked.headers if name.startswith("access-control")]
        for kind in ({}, {"Content-Type": "text/plain"}):  # what a page may send without asking first
            simple = up.http.post("/v1/chat/completions", content=json.dumps(CHAT).encode(), headers=kind)
            assert simple.status_code == 400
        preflight = up.http.options(
            "/v1/chat/completions",
            headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
        )
        assert preflight.status_code == 405


def test_what_can_be_got_can_be_looked_for() -> None:
    with served() as up:
        for path in ("/", "/health", "/ready", "/v1/models"):
            looked = up.http.head(path)
            assert (looked.status_code, looked.content) == (200, b""), path
        assert up.http.head("/v1/models/nobody").status_code == 404


@pytest.mark.parametrize("declared", [True, False])
def test_a_huge_body_is_refused_before_it_is_read(declared: bool) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    part = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    endless = (
        b"Content-Length: 99999999999\r\n\r\n"
        if declared
        else b"Transfer-Encoding: chunked\r\n\r\n" + 3 * part
    )
    with served(body_limit=10_000) as up:
        answer = up.sent(head + endless)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"10000 bytes are taken" in answer


def test_slow_clients_are_dropped() -> None:
    with served(patience=0.5) as up:
        start = time.monotonic()
        with up.connected() as silent, up.connected() as half, up.connected() as slow:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
            slow.sendall(up.post(CHAT)[:-10])
            assert silent.recv(100) == b""
            assert half.recv(100) == b""
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - start < 10
        assert up.ask("the flake", max_tokens=5).status_code == 200


def test_a_client_that_does_not_read_is_dropped() -> None:
    with served(patience=0.5, slots=1) as up:
        body = CHAT | {"max_tokens": 4000, "stream": True, "n": 16, "logprobs": True, "top_logprobs": 20}
        with up.connected() as client:
            client.sendall(up.post(body))
            up.settled(lambda: up.server.targets.get("").counters.finished["cancelled"] > 0)
        up.settled(lambda: up.server.worker._reserved == 0)
        assert up.ask("the flake", max_tokens=5).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/static/../app.py",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/omnidraft/profiles/..%2f..%2fetc",
        "/v1/omnidraft/profiles/%2e%2e",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/omnidraft/profiles/a%00b",
    ],
)
def test_no_path_leads_out(path: str) -> None:
    with served() as up:
        for method in ("GET", "DELETE"):
            request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            assert up.sent(request.encode())[9:12] in (b"400", b"404", b"405")


def test_what_is_no_http_is_refused_and_harms_nobody() -> None:
    with served() as up:
        for nonsense in (
            b"\x16\x03\x01\x02",
            b"GET",
            b"GET / HTTP/x",
            b"GET / HTTP/1.1\r\nHo st: x",
            b"A" * 70_000,
        ):
            assert up.sent(nonsense + b"\r\n\r\n")[:12] == b"HTTP/1.1 400"
        assert up.ask("the flake", max_tokens=5).status_code == 200


# The command


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["omnidraft", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--target", "x", "--host", "0.0.0.0"), "set an API key"),
        (("serve", "--target", "x", "--learn", "now"), "unknown learn 'now'"),
        (("serve", "--target", "x", "--method", "plain", "--learn", "idle"), "no drafter to learn"),
        (("serve", "--target", "x", "--profile", "a/b"), "cannot be a profile's name"),
        (
            ("serve", "--target", "x", "--host", "192.0.2.1", "--api-key", "k"),
            "192.0.2.1:8000 cannot be served on",
        ),
        (("chat",), "name a --target, or a --server"),
        (("chat", "--server", "x"), "'x' is no server's address"),
        (("chat", "--server", "http://127.0.0.1:9"), "is `omnidraft serve` up"),
        (
            ("chat", "--server", "http://127.0.0.1:9", "--method", "ngram"),
            "--method is the server's to choose",
        ),
    ],
)
def test_commands_that_are_refused(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err


def test_chat_with_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with served(api_key="k3y") as up:
        lines = io.StringIO("the flake\n/stats\n" + "x" * 20000 + "\n/quit\n")
        monkeypatch.setattr("builtins.input", lambda prompt: lines.readline().rstrip("\n"))
        monkeypatch.setenv("OMNIDRAFT_API_KEY", "k3y")
        assert run(monkeypatch, "chat", "--server", up.url, "--max-tokens", "9") == 0
        shown = capsys.readouterr()
        assert plain("the flake", max_tokens=9) in shown.out
        assert shown.err.count("9 tokens, ") == 2
        assert "error: the prompt has 20" in shown.err
        assert run(monkeypatch, "chat", "--server", up.url, "--target", "nope") == 2
        assert "there is no model nope" in capsys.readouterr().err
        monkeypatch.delenv("OMNIDRAFT_API_KEY")
        assert run(monkeypatch, "chat", "--server", up.url) == 2
        assert "the API key is missing or wrong" in capsys.readouterr().err
