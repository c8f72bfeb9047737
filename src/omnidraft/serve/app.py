"""The app, and running it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from omnidraft import __version__
from omnidraft.engine import OmniDraft
from omnidraft.errors import OptionError
from omnidraft.serve import errors
from omnidraft.serve.guard import Guard, connections
from omnidraft.serve.routes import router
from omnidraft.serve.server import Server
from omnidraft.serve.settings import LOCAL_NAMES, Settings

_CONNECTIONS = 1000  # at once; further ones are answered 503
_GRACE = 10  # seconds that answers under way get when the server stops


def create_app(server: Server) -> FastAPI:
    """The ASGI app in front of a server, which the caller closes."""
    settings = server.settings
    app = FastAPI(title="OmniDraft", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = server
    errors.install(app)
    app.include_router(router)
    app.add_middleware(
        Guard,
        api_key=settings.api_key,
        hosts=(*LOCAL_NAMES, settings.host) if settings.local and not settings.api_key else (),
        body_limit=settings.body_limit,
        patience=settings.patience,
    )
    return app


def run(settings: Settings, load: Callable[[str], OmniDraft], *, started: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `started` is told the URL when the first target is loaded.

    Raises:
        OptionError: the port is taken, or the address is not here.
        OmniDraftError: the first target cannot be loaded.
    """
    with listen(settings) as listening:
        server = Server(settings, load)
        try:
            server.targets.get("")
            listening.listen()  # who was told the address may come at once
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            started(f"http://{host}:{listening.getsockname()[1]}")
            logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
            if settings.log_prompts:
                logging.getLogger("omnidraft.serve").setLevel(logging.INFO)
            with _stopping_by_signal():
                web_server(server).run(sockets=[listening])
        finally:
            server.close()


@contextlib.contextmanager
def _stopping_by_signal() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more when it is done; by then it has done its work."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def web_server(server: Server) -> uvicorn.Server:
    """What speaks HTTP in front of a server."""
    config = uvicorn.Config(
        create_app(server),
        http=connections(server.settings.patience),
        ws="none",
        log_level="warning",
        access_log=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE,
        server_header=False,
    )
    return uvicorn.Server(config)


def listen(settings: Settings) -> socket.socket:
    """Bound before any model is loaded: a port that is taken is said at once."""
    listening = None
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host, settings.port))
    except OSError as error:
        if listening:
            listening.close()
        raise OptionError(
            f"{settings.host}:{settings.port} cannot be served on ({error.strerror}); choose another --port or --host"
        ) from error
    return listening
