"""Errors as OpenAI's clients know them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from omnidraft.errors import (
    ContextLengthError,
    MissingExtraError,
    OmniDraftError,
    OptionError,
    ProfileError,
)

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    """See `ErrorBody`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error's body is."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.detail = ErrorDetail(
            message=message, type=_KINDS.get(status, "server_error"), param=param, code=code
        )

    @property
    def body(self) -> dict[str, Any]:
        """The JSON form."""
        return ErrorBody(error=self.detail).model_dump()

    @property
    def response(self) -> JSONResponse:
        """The HTTP form."""
        return JSONResponse(self.body, self.status, self.headers)


def as_api_error(error: OmniDraftError) -> ApiError:
    """What a client is told of an error of the library's."""
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, ProfileError):
        status = 409 if "in use by another process" in str(error) else 400
        return ApiError(status, str(error), code="profile_error")
    asked_wrongly = isinstance(error, (OptionError, MissingExtraError))
    return ApiError(400 if asked_wrongly else 500, str(error))


def install(app: FastAPI) -> None:
    """Let every error leave the app in this form."""

    @app.exception_handler(ApiError)
    async def own(request: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(OmniDraftError)
    async def library(request: Request, error: OmniDraftError) -> JSONResponse:
        return as_api_error(error).response

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # The one that lies deepest: where a field may have several types, it is of the one that was meant.
        first = max(error.errors(), key=lambda one: len(one["loc"]))
        # Of a field that may have several types, pydantic names the type too: "constrained-str", "list[int]".
        where = ".".join(
            str(part)
            for part in first["loc"]
            if part != "body" and (isinstance(part, int) or part.isidentifier())
        )
        message = f"{where}: {first['msg']}" if where else first["msg"]
        # The client's own words may be no valid Unicode.
        message = message.encode("utf-8", "replace").decode()
        return ApiError(400, message, param=where.encode("utf-8", "replace").decode() or None).response

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed; its log says more").response
