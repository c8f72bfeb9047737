"""One request's jobs, and what comes of them, from the worker's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.types import Receive

from omnidraft.serve.worker import Event, Failed, Finished, Job, Worker

Batch = list[tuple[int, Event]]  # of a request's jobs, by index


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """Submits jobs and gathers their events. It must be closed, whatever happens: that cancels what is not done."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._jobs: Sequence[Job] = ()
        self._left = 0
        self._watching: asyncio.Task[None] | None = None

    def emitter(self, index: int) -> Callable[[Event], None]:
        """What the job of that index calls, in the worker's thread."""

        def emit(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, event))

        return emit

    def submit(self, jobs: Sequence[Job], receive: Receive) -> None:
        """Queue the jobs, and watch whether the client stays. Errors as `Worker.submit`."""
        self._worker.submit(jobs)
        self._jobs, self._left = jobs, len(jobs)
        self._watching = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        message: Any = {}
        while message.get("type") != "http.disconnect":
            message = await receive()
        self._arrived.put_nowait(None)

    async def events(self) -> AsyncIterator[Batch]:
        """What has come since the last turn, until every job is done.

        Raises:
            ClientGone: the client left.
            ApiError: a job failed.
        """
        while self._left:
            come = [await self._arrived.get()]
            while not self._arrived.empty():
                come.append(self._arrived.get_nowait())
            batch: Batch = []
            for one in come:
                if one is None:
                    raise ClientGone
                if isinstance(one[1], Failed):
                    raise one[1].error
                self._left -= isinstance(one[1], Finished)
                batch.append(one)
            yield batch

    def close(self) -> None:
        """Cancel what is not done."""
        for job in self._jobs:
            job.cancelled = True
        if self._watching:
            self._watching.cancel()
