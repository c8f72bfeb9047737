"""The routes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from omnidraft.learn.profile import ProfileKey
from omnidraft.serve.errors import ApiError, ErrorBody
from omnidraft.serve.metrics import render
from omnidraft.serve.schemas import ChatRequest, CompletionRequest
from omnidraft.serve.server import Server
from omnidraft.serve.status import status_of

STATIC = Path(__file__).parent / "static"
_REFUSALS: Any = {
    code: {"model": ErrorBody} for code in (400, 401, 403, 404, 408, 409, 413, 429, 500, 503, 504)
}
_Profile = Annotated[
    str | None, Header(alias="X-OmniDraft-Profile", description="The profile that learns, and drafts.")
]

router = APIRouter(responses=_REFUSALS)


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


@router.post("/v1/chat/completions")
async def chat_completions(asked: ChatRequest, request: Request, profile: _Profile = None) -> Response:
    """Answer a chat."""
    return await _server(request).chat(request, asked, profile)


@router.post("/v1/completions")
async def completions(asked: CompletionRequest, request: Request, profile: _Profile = None) -> Response:
    """Go on with a text."""
    return await _server(request).complete(request, asked, profile)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The targets that may be asked for."""
    return {"object": "list", "data": [_model(name) for name in _server(request).targets.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One target."""
    if name not in _server(request).targets.names:
        raise ApiError(404, f"there is no model {name!r} here", code="model_not_found", param="model")
    return _model(name)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "omnidraft"}


@router.get("/v1/omnidraft/status")
async def status(request: Request) -> dict[str, Any]:
    """What the dashboard shows."""
    return await asyncio.to_thread(status_of, _server(request))


@router.get("/v1/omnidraft/profiles")
async def profiles(request: Request) -> dict[str, Any]:
    """All profiles of this server's drafter and targets."""
    return {"profiles": await asyncio.to_thread(_server(request).profiles.as_dicts)}


@router.get("/v1/omnidraft/profiles/{name}")
async def profile(name: str, request: Request) -> dict[str, Any]:
    """One profile, for each target that it is kept for."""
    every = await asyncio.to_thread(_server(request).profiles.as_dicts)
    found = [entry for entry in every if entry["name"] == name]
    if not found:
        raise ApiError(404, f"there is no profile {name!r} here", code="profile_not_found")
    return {"profiles": found}


@router.delete("/v1/omnidraft/profiles/{name}")
async def forget(name: str, request: Request) -> dict[str, Any]:
    """Forget all that a profile learned, as soon as no answer of it is under way."""
    ProfileKey("drafter", "target", name)
    server = _server(request)
    errand = server.worker.between(lambda: server.profiles.forget(name), name)
    if not await asyncio.wrap_future(errand):
        raise ApiError(404, f"there is no profile {name!r} here", code="profile_not_found")
    return {"name": name, "deleted": True}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counts for Prometheus."""
    text, kind = await asyncio.to_thread(render, _server(request))
    return Response(text, media_type=kind)


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether the server works at all."""
    if not _server(request).worker.alive:
        raise ApiError(503, "the worker has ended")
    return PlainTextResponse("ok")


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether a request would be taken now."""
    server = _server(request)
    if not (server.worker.alive and server.targets.loaded):
        raise ApiError(503, "not ready")
    return JSONResponse({"ready": True, "running": server.worker.running, "waiting": server.worker.waiting})


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The dashboard."""
    return FileResponse(STATIC / "index.html")
