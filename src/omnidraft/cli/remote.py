"""A model behind a server, for `chat --server`: OpenAI's protocol by the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any

from omnidraft.errors import OmniDraftError, OptionError


class ServerError(OmniDraftError):
    """A server that cannot be reached, or that refuses."""


class Counts:
    """What a server says of its Steps, in the place of `omnidraft.Stats`."""

    def __init__(self, counts: dict[str, Any]) -> None:
        self._counts = counts

    def as_dict(self) -> dict[str, Any]:
        """Its JSON form."""
        return self._counts


class Remote:
    """What `chat` needs of an OmniDraft: `stream` and `stats`."""

    def __init__(self, url: str, model: str | None, api_key: str) -> None:
        """`model`: the server's first one if None.

        Raises:
            OptionError: no http or https address.
            ServerError: nobody answers there, or there is no such model.
        """
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"{url!r} is no server's address; write it as http://127.0.0.1:8000")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        try:
            names = [entry["id"] for entry in self._json("/v1/models")["data"]]
            names[0]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{url} is no server of models; give the address of `omnidraft serve`"
            ) from error
        if model not in (None, *names):
            raise ServerError(f"there is no model {model} at {url}; there are {', '.join(names)}")
        self._model = model or names[0]

    def stream(self, messages: Sequence[Mapping[str, str]], **options: Any) -> RemoteStream:
        """An answer as it comes; options by OpenAI's names.

        Raises:
            ServerError: the server refuses.
        """
        body = {"model": self._model, "messages": list(messages), "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        body |= {name: value for name, value in options.items() if value is not None}
        return RemoteStream(self._open("/v1/chat/completions", body))

    @property
    def stats(self) -> Counts:
        """What the server's target has done since the server started."""
        targets = self._json("/v1/omnidraft/status")["targets"]
        counters = next(one.get("counters") for one in targets if one["name"] == self._model)
        return Counts(counters or {"steps": 0})

    def _json(self, path: str) -> Any:
        with self._open(path) as response:
            return json.load(response)

    def _open(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self._url + path, data, headers))
        except urllib.error.HTTPError as error:
            with error:
                said = _reason(error.read())
            raise ServerError(
                said or f"{self._url} answers {error.code}; is it `omnidraft serve`?"
            ) from error
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"{self._url} cannot be reached ({reason}); is `omnidraft serve` up?"
            ) from error


class RemoteStream(Iterator[str]):
    """An answer's text, and its `stats` when it is over."""

    def __init__(self, response: Any) -> None:
        self.stats = Counts({"steps": 0})
        self._texts = self._read(response)

    def __next__(self) -> str:
        return next(self._texts)

    def _read(self, response: Any) -> Iterator[str]:
        with response:
            for data in _events(response):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                if "omnidraft" in (chunk.get("usage") or {}):
                    self.stats = Counts(chunk["usage"]["omnidraft"])
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text


def _events(response: Any) -> Iterator[bytes]:
    """The data of a stream's events, to its end."""
    why = ""
    try:
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data:
                yield data
    except (OSError, HTTPException) as error:
        why = f" ({error or type(error).__name__})"
    raise ServerError(f"the server is gone in mid-answer{why}; ask again")


def _reason(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
