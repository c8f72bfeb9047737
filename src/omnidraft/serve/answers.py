"""Answers in OpenAI's form: whole, and chunk by chunk."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, Protocol

from omnidraft.serve.logprobs import TokenLogprob
from omnidraft.serve.targets import Target
from omnidraft.serve.tools import ToolReader
from omnidraft.serve.worker import Finished, Shown
from omnidraft.stats import Stats
from omnidraft.translate import crossings


class Form(Protocol):
    """How one endpoint's answers look."""

    def chunk(self, index: int, shown: Shown) -> dict[str, Any] | None:
        """What a stream says of a step; None for nothing."""

    def last(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        """What a stream says when an answer ends."""

    def usage(self, finished: list[Finished]) -> dict[str, Any]:
        """The last chunk of a stream with usage."""

    def whole(self, shown: list[list[Shown]], finished: list[Finished]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""


class _Form:
    kind: str
    prefix: str

    def __init__(self, target: Target, *, steps: bool, n: int) -> None:
        """`n`: answers to each prompt; the choices of a prompt stand side by side."""
        self._model = target.model
        self._steps = steps
        self._n = n
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": target.name,
        }

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self._head | {"object": kind, "choices": choices} | more

    def _usage(self, finished: list[Finished]) -> dict[str, Any]:
        """Tokens as OpenAI counts them, and under `omnidraft` what the answers took."""
        stats = Stats()
        for one in finished:
            stats.merge(one.stats)
        prompt = sum(one.prompt for one in finished[:: self._n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": stats.tokens,
            "total_tokens": prompt + stats.tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in finished[:: self._n])},
            "omnidraft": stats.as_dict(),
        }

    def _origin(self, shown: Shown) -> dict[str, Any]:
        """Where a chunk's text came from, for who asked for it."""
        if not self._steps:
            return {}
        chunk, step = shown.chunk, shown.chunk.step
        sources: list[str] = [source for _, source in chunk.pieces]
        rejected = b""
        if step:
            vocab = self._model.target.vocab
            if not chunk.stopped:
                rejected = vocab.decode(step.proposal.tokens[step.accepted :])
            if self._model.drafter and "drafted" in sources:
                draft = [self._model.drafter.vocab.pieces[token] for token in step.draft.tokens]
                crossed = crossings(draft, [vocab.pieces[token] for token in step.proposal.tokens])
                sources[: step.accepted] = crossed[: step.accepted]
        return {
            "omnidraft": {
                "pieces": [
                    {"text": text, "source": source}
                    for (text, _), source in zip(chunk.pieces, sources, strict=True)
                    if text
                ],
                "rejected": rejected.decode("utf-8", "replace"),
                "tokens": len(step.tokens) if step else 0,
                "drafted": len(step.proposal.tokens) if step else 0,
                "accepted": step.accepted if step else 0,
                "seconds": step.seconds if step else 0.0,
            }
        }


class ChatForm(_Form):
    """/v1/chat/completions."""

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(self, target: Target, *, steps: bool, n: int, tools: bool) -> None:
        super().__init__(target, steps=steps, n=n)
        self._readers = [ToolReader() for _ in range(n)] if tools else None
        self._begun: set[int] = set()

    def chunk(self, index: int, shown: Shown) -> dict[str, Any] | None:
        """See `Form`."""
        text = shown.chunk.text
        if self._readers:
            text = self._readers[index].feed(text)
        if not (text or shown.logprobs or self._steps or index not in self._begun):
            return None
        delta = self._opened(index, {"content": text})
        return self._delta(index, delta, None, shown.logprobs, **self._origin(shown))

    def last(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        """See `Form`."""
        chunks, reason = [], finished.reason
        if self._readers:
            text, calls = self._readers[index].end()
            if text:
                chunks.append(self._delta(index, self._opened(index, {"content": text})))
            if calls:
                reason = "tool_calls"
                numbered = [{"index": i} | call for i, call in enumerate(calls)]
                chunks.append(self._delta(index, self._opened(index, {"tool_calls": numbered})))
        return [*chunks, self._delta(index, self._opened(index, {}), reason)]

    def usage(self, finished: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        return self._body("chat.completion.chunk", [], usage=self._usage(finished))

    def whole(self, shown: list[list[Shown]], finished: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        choices = []
        for index, (steps, end) in enumerate(zip(shown, finished, strict=True)):
            text, reason = "".join(step.chunk.text for step in steps), end.reason
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if self._readers:
                text = self._readers[index].feed(text)
                rest, calls = self._readers[index].end()
                message["content"] = text + rest
                if calls:
                    message |= {"content": text + rest or None, "tool_calls": calls}
                    reason = "tool_calls"
            logprobs = [one for step in steps for one in step.logprobs]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": _chat_logprobs(logprobs),
                    "finish_reason": reason,
                }
            )
        return self._body(self.kind, choices, usage=self._usage(finished))

    def _opened(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        if index in self._begun:
            return delta
        self._begun.add(index)
        return {"role": "assistant"} | delta

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs:
            choice["logprobs"] = _chat_logprobs(logprobs)
        return self._body("chat.completion.chunk", [choice], **more)


class CompletionForm(_Form):
    """/v1/completions."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, target: Target, *, steps: bool, n: int, prompts: int) -> None:
        super().__init__(target, steps=steps, n=n)
        self._offsets = [0] * (n * prompts)  # characters so far, by choice

    def chunk(self, index: int, shown: Shown) -> dict[str, Any] | None:
        """See `Form`."""
        if not (shown.chunk.text or shown.logprobs or self._steps):
            return None
        return self._choice(index, shown.chunk.text, None, shown.logprobs, **self._origin(shown))

    def last(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        """See `Form`."""
        return [self._choice(index, "", finished.reason, [])]

    def usage(self, finished: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        return self._body(self.kind, [], usage=self._usage(finished))

    def whole(self, shown: list[list[Shown]], finished: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        choices = []
        for index, (steps, end) in enumerate(zip(shown, finished, strict=True)):
            text = "".join(step.chunk.text for step in steps)
            logprobs = [one for step in steps for one in step.logprobs]
            choices += self._choice(index, text, end.reason, logprobs)["choices"]
        return self._body(self.kind, choices, usage=self._usage(finished))

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: list[TokenLogprob], **more: Any
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if logprobs:
            offsets = []
            for one in logprobs:
                offsets.append(self._offsets[index])
                self._offsets[index] += len(one.text)
            choice["logprobs"] = {
                "tokens": [one.text for one in logprobs],
                "token_logprobs": [one.logprob for one in logprobs],
                "top_logprobs": [{text: value for _, text, value in one.top} for one in logprobs],
                "text_offset": offsets,
            }
        return self._body(self.kind, [choice], **more)


def _chat_logprobs(logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": [one.as_dict() for one in logprobs], "refusal": None} if logprobs else None


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
