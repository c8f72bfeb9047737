"""What the routes share: targets, worker and profiles, and how a request becomes jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from omnidraft.engine import OmniDraft
from omnidraft.errors import ContextLengthError, OptionError
from omnidraft.learn.profile import ProfileStore
from omnidraft.options import Options, make_options
from omnidraft.sampling import Processor
from omnidraft.serve.answers import ChatForm, CompletionForm, Form, event
from omnidraft.serve.errors import ApiError
from omnidraft.serve.exchange import Batch, ClientGone, Exchange
from omnidraft.serve.profiles import Profiles
from omnidraft.serve.schemas import ChatRequest, CompletionRequest
from omnidraft.serve.settings import Settings
from omnidraft.serve.targets import Target, Targets
from omnidraft.serve.worker import Finished, Job, Shown, Worker
from omnidraft.types import Row

_log = logging.getLogger(__name__)
_GONE = 499  # what nginx calls a client that left


class Server:
    """All that lives as long as the server."""

    def __init__(
        self, settings: Settings, load: Callable[[str], OmniDraft], store: ProfileStore | None = None
    ) -> None:
        self.settings = settings
        self.targets = Targets(settings.targets, load)
        self.profiles = Profiles(settings, self.targets, store)
        self._loader = ThreadPoolExecutor(1, "omnidraft-loader")
        self.worker = Worker(self.profiles, slots=settings.slots, queue=settings.queue, part=settings.part)

    def close(self) -> None:
        """Stop, and save what was learned.

        Raises:
            ProfileError: a profile cannot be written; the others are.
        """
        self._loader.shutdown(cancel_futures=True)
        self.worker.close()
        with contextlib.ExitStack() as closing:
            for target in self.targets.loaded:
                closing.callback(target.model.close)

    async def chat(self, request: Request, asked: ChatRequest, profile: str | None) -> Response:
        """Answer /v1/chat/completions."""

        def prepare(target: Target) -> tuple[list[list[int]], Form]:
            messages = [message.for_template() for message in asked.messages]
            self._say(target, messages)
            tools = asked.offered_tools
            prompt = target.model.target.chat(messages, tools)
            said = any(message["content"] or message.get("tool_calls") for message in messages)
            if not (said and prompt):  # a template may have no words for tool calls
                raise OptionError("the messages are empty; give some text")
            form = ChatForm(
                target,
                steps=asked.omnidraft.steps,
                n=asked.n or 1,
                tools=bool(tools),
            )
            return [prompt], form

        schema = asked.response_format.wanted if asked.response_format else None
        return await self._answer(request, asked, profile, prepare, schema)

    async def complete(self, request: Request, asked: CompletionRequest, profile: str | None) -> Response:
        """Answer /v1/completions."""

        def prepare(target: Target) -> tuple[list[list[int]], Form]:
            self._say(target, asked.prompts)
            model, prompts = target.model.target, asked.prompts
            tokens = [model.encode(one) if isinstance(one, str) else one for one in prompts]
            for one in tokens:
                if not one:
                    raise OptionError("the prompt is empty; give some text")
                if max(one) >= model.vocab.size:
                    raise OptionError(f"token {max(one)} is none of {target.name}'s; send text instead")
            form = CompletionForm(
                target,
                steps=asked.omnidraft.steps,
                n=asked.n or 1,
                prompts=len(tokens),
            )
            return tokens, form

        return await self._answer(request, asked, profile, prepare, None)

    def _say(self, target: Target, prompt: Any) -> None:
        if self.settings.log_prompts:
            _log.info("%s is asked: %s", target.name, prompt)

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        profile: str | None,
        prepare: Callable[[Target], tuple[list[list[int]], Form]],
        schema: dict[str, Any] | None,
    ) -> Response:
        deadline = time.monotonic() + self.settings.timeout
        places = (asked.n or 1) * (len(asked.prompts) if isinstance(asked, CompletionRequest) else 1)
        if places > self.worker.capacity:
            raise ApiError(400, f"{places} answers are more than this server has places for", param="n")
        self.worker.reserve(places)
        exchange = Exchange(self.worker)
        handed_over = False
        try:
            target = self.targets.find(asked.model)
            if (
                target is None
            ):  # not among the threads that prepare requests: those who wait would take them all
                loop = asyncio.get_running_loop()
                target = await loop.run_in_executor(self._loader, self.targets.get, asked.model)
            jobs, form = await asyncio.to_thread(
                self._jobs, target, asked, profile, prepare, schema, exchange, deadline
            )
            exchange.submit(jobs, request.receive)
            events = exchange.events()
            if not asked.stream:
                return JSONResponse(await _whole(form, events, len(jobs)))
            first = await anext(events)  # an error before it has a status of its own
            handed_over = True

            def done() -> None:
                exchange.close()
                self.worker.release(places)

            return _EventStream(form, first, events, asked.wants_usage, done)
        except ClientGone:
            return Response(status_code=_GONE)
        finally:
            if not handed_over:
                exchange.close()
                self.worker.release(places)

    def _jobs(
        self,
        target: Target,
        asked: ChatRequest | CompletionRequest,
        profile: str | None,
        prepare: Callable[[Target], tuple[list[list[int]], Form]],
        schema: dict[str, Any] | None,
        exchange: Exchange,
        deadline: float,
    ) -> tuple[list[Job], Form]:
        """One job for each answer. Tokenizes, and compiles grammars, while the worker goes on with others' answers."""
        prompts, form = prepare(target)
        named = self.profiles.named(target, profile, asked.user)
        jobs: list[Job] = []
        for prompt in prompts:
            limit = self._limit(target, len(prompt), asked.limit)
            for choice in range(asked.n or 1):
                job = Job(
                    target,
                    prompt,
                    self._options(target, asked, choice, limit, schema),
                    exchange.emitter(len(jobs)),
                    deadline,
                    profile=named,
                    learns=asked.omnidraft.learn,
                    top_logprobs=asked.logprobs_wanted,
                )
                jobs.append(job)
        return jobs, form

    def _limit(self, target: Target, prompt: int, asked: int | None) -> int:
        context = target.model.target.context_length
        if self.settings.context_limit:
            context = min(context, self.settings.context_limit)
        if prompt >= context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {target.name} holds {context} here; shorten the prompt"
            )
        return min(asked or context, context - prompt)

    def _options(
        self,
        target: Target,
        asked: ChatRequest | CompletionRequest,
        choice: int,
        limit: int,
        schema: dict[str, Any] | None,
    ) -> Options:
        options = {**self.settings.options, **asked.sampling(choice), "max_tokens": limit}
        if asked.logit_bias:
            options["processors"] = (_biased(target, asked.logit_bias),)
        if schema is not None:
            from omnidraft.processors import json_schema

            grammar = json_schema(target.model.target.vocab, schema)
            options["processors"] = (*options.get("processors", ()), grammar)
        return make_options(**options)


def _biased(target: Target, bias: dict[int, float]) -> Processor:
    if (last := max(bias)) >= target.model.target.vocab.size:
        raise ApiError(400, f"token {last} is none of {target.name}'s; leave it out", param="logit_bias")
    ids, values = np.array([*bias]), np.array([*bias.values()], np.float32)

    def process(tokens: Sequence[int], row: Row) -> Row:
        changed = row.copy()
        changed[ids] += values
        return changed

    return process


async def _whole(form: Form, events: AsyncIterator[Batch], count: int) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    shown: list[list[Shown]] = [[] for _ in range(count)]
    finished: dict[int, Finished] = {}
    async for batch in events:
        for index, one in batch:
            if isinstance(one, Finished):
                finished[index] = one
            elif isinstance(one, Shown):
                shown[index].append(one)
    return form.whole(shown, [finished[index] for index in range(count)])


class _EventStream(Response):
    """Server-sent events as they come; an error after the first is an event too."""

    def __init__(
        self,
        form: Form,
        first: Batch,
        rest: AsyncIterator[Batch],
        usage: bool,
        done: Callable[[], None],
    ) -> None:
        self._form, self._first, self._rest = form, first, rest
        self._usage, self._done = usage, done
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send(send)
        except ClientGone:
            pass
        finally:
            self._done()

    async def _send(self, send: Send) -> None:
        finished: dict[int, Finished] = {}

        async def out(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await out(self._events(self._first, finished))
            async for batch in self._rest:
                if data := self._events(batch, finished):
                    await out(data)
            if self._usage:
                await out(event(self._form.usage([finished[index] for index in sorted(finished)])))
        except ApiError as error:
            await out(event(error.body))
        await out(b"data: [DONE]\n\n", more=False)

    def _events(self, batch: Batch, finished: dict[int, Finished]) -> bytes:
        bodies: list[dict[str, Any]] = []
        for index, one in batch:
            if isinstance(one, Finished):
                finished[index] = one
                bodies += self._form.last(index, one)
            elif isinstance(one, Shown) and (body := self._form.chunk(index, one)):
                bodies.append(body)
        return b"".join(map(event, bodies))
