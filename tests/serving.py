"""A real server on a loopback port, in a thread of this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from toy import ToyModel, ToySession, toy_vocab

from omnidraft import OmniDraft
from omnidraft.learn.profile import ProfileStore
from omnidraft.serve.app import listen, web_server
from omnidraft.serve.server import Server
from omnidraft.serve.settings import Settings

TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
DRAFTER = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)
GREEDY: dict[str, Any] = dict(temperature=0)


class Slow(ToyModel):
    """A toy whose passes take their time, so that answers are under way when something else happens."""

    def __init__(self, seconds: float) -> None:
        super().__init__(TARGET.vocab, name="target", seed=1)
        self.seconds = seconds

    def session(self) -> ToySession:
        return _SlowSession(self)


class _SlowSession(ToySession):
    def extend(self, tokens: Any, rows: int) -> Any:
        time.sleep(self._model.seconds)  # type: ignore[attr-defined]
        return super().extend(tokens, rows)


def load(name: str) -> OmniDraft:
    return OmniDraft(TARGET, DRAFTER)


@dataclass
class Served:
    url: str
    server: Server
    openai: openai.OpenAI
    http: httpx.Client  # knows the address; making one takes a third of a second

    def ask(self, text: str, **body: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **GREEDY, **body}
        return self.http.post("/v1/chat/completions", json=body)

    def connected(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=30)

    def post(self, body: Any) -> bytes:
        """A chat request as it goes over the wire."""
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def sent(self, data: bytes) -> bytes:
        """What comes back for these bytes until the server closes the connection."""
        with self.connected() as client:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))

    def settled(self, happened: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not happened():
            assert time.monotonic() < until
            time.sleep(0.005)


@contextmanager
def served(
    load: Callable[[str], OmniDraft] = load, store: ProfileStore | None = None, **settings: Any
) -> Iterator[Served]:
    fixed = {"method": "text", "k": 4}  # what is drafted does not depend on how busy the machine is
    chosen = Settings(**({"targets": ("target", "other"), "port": 0, "options": fixed} | settings))
    listening = listen(chosen)
    server = Server(chosen, load, store)
    server.targets.get("")
    web = web_server(server)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    thread.start()
    while not web.started:
        time.sleep(0.005)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        with (
            httpx.Client(
                base_url=url, timeout=60, verify=False, limits=httpx.Limits(max_connections=100)
            ) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http) as client,
        ):
            yield Served(url, server, client, http)
    finally:
        web.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive()
        server.close()


def plain(text: str, **options: Any) -> str:
    """What the target says without any drafter."""
    return OmniDraft(TARGET, None).generate(text, **{"max_tokens": 4096 - 100} | options).text
