"""What stands before the routes: who may ask, how much, and how slowly."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from omnidraft.serve.errors import ApiError

_OPEN = ("/", "/health", "/ready")  # need no key: they tell nothing


class Guard:
    """ASGI middleware: the API key, the Host header, the size of a body and the time it may take."""

    def __init__(
        self, app: ASGIApp, *, api_key: str, hosts: Collection[str], body_limit: int, patience: float
    ) -> None:
        """`hosts`: the names by which the server may be called, any if empty: a page that a browser shows could
        otherwise let its own name point here, and read what this machine's user alone may."""
        self._app = app
        self._key = api_key.encode()
        self._hosts = hosts
        self._body_limit = body_limit
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Guard`."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if scope["method"] == "HEAD":  # as GET; the body stays away further out
            scope = {**scope, "method": "GET"}
        if refusal := self._refusal(scope["path"], headers):
            refusal.headers["Connection"] = "close"  # a body may be under way still
            return await refusal.response(scope, receive, send)
        return await self._app(scope, self._bounded(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts and _name(host) not in self._hosts:
            return ApiError(403, f"this server is not called {host!r}; call it by its address")
        if self._key and path not in _OPEN and not self._knows(headers.get(b"authorization", b"")):
            headers_ = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers_)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._body_limit:
            return ApiError(413, f"the request is too large; {self._body_limit} bytes are taken")
        return None

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"

    def _bounded(self, receive: Receive) -> Receive:
        size, whole = 0, False
        until = asyncio.get_running_loop().time() + self._patience

        async def bounded() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError as error:
                close = {"Connection": "close"}
                raise HTTPException(408, "the request took too long to arrive", close) from error
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._body_limit:
                close = {"Connection": "close"}
                raise HTTPException(
                    413, f"the request is too large; {self._body_limit} bytes are taken", close
                )
            return message

        return bounded


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def connections(patience: float) -> type[H11Protocol]:
    """uvicorn's protocol, which drops a client that takes longer than `patience` seconds to send the head of a
    request, or to read what is ready for it."""

    class Connection(H11Protocol):
        _due: asyncio.TimerHandle | None = None
        _stuck: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_head()

        def _await_head(self) -> None:
            busy = self.cycle is not None and not self.cycle.response_complete
            if busy and self._due:
                self._due.cancel()
                self._due = None
            elif not busy and not self._due:
                self._due = self.loop.call_later(patience, self._give_up)

        def _give_up(self) -> None:
            self._due = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stuck = self.loop.call_later(patience, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stuck:
                self._stuck.cancel()
                self._stuck = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._due, self._stuck):
                if timer:
                    timer.cancel()

    return Connection
