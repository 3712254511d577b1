"""The front's shell: its two ways in, ZeroMQ and HTTP, which share `Answers`, and its statistics.

On the ZeroMQ side requests come from the socket's thread to the event loop, and text goes back, each to exactly one
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict

from services.front.answers import Answers, Generation
from services.front.chat_message import ChunkWriter, request_of
from services.front.http.server import HttpServer
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import Chat, TextChunk
from shared.runtime.context import ServiceContext
from shared.stats import StatsPublisher
from shared.transport.request import Request
from shared.transport.server import Server

log = logging.getLogger(__name__)

# What running requests get to end by themselves when the service stops.
DRAIN_S = 1.0
# How soon a cancel or a client's disappearance is noticed.
CANCEL_LOOK_S = 0.01


class FrontService:
    """Both ways in, from start to stop."""

    def __init__(
        self, context: ServiceContext, answers: Answers, http: HttpServer | None, labels: dict[str, str]
    ) -> None:
        self._context = context
        self._answers = answers
        self._http = http
        self._labels = labels
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[Request, Generation] = {}
        self._is_busy = asyncio.Event()
        self._server = Server(context.config.endpoint("front"), context.identity, self._handle)
        self._stats = StatsPublisher(context.config.endpoint("front.stats"), context.identity, self._collect)

    async def run(self) -> None:
        """Serve until the context stops. Raises what makes serving impossible."""
        stop = asyncio.Event()
        self._context.on_stop(lambda: self._wake(stop))
        self._server.start()
        self._stats.start()
        jobs: set[asyncio.Task[object]] = {
            asyncio.create_task(self._answers.link.keep(), name="worker link"),
            asyncio.create_task(self._watch_cancels(), name="cancels"),
            asyncio.create_task(stop.wait(), name="stop"),
        }
        if self._http is not None:
            jobs.add(asyncio.create_task(self._http.serve(), name="http"))
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(jobs - done)
        finally:
            await asyncio.to_thread(self._server.stop)
            for task in (*self._tasks, *jobs):
                task.cancel()
            await asyncio.gather(*self._tasks, *jobs, return_exceptions=True)
            self._stats.stop()
        for job in done:
            job.result()

    async def _drain(self, jobs: set[asyncio.Task[object]]) -> None:
        """Both ways in let what runs end by itself for a moment, at the same time."""
        if self._http is not None:
            self._http.stop()
        await asyncio.gather(asyncio.to_thread(self._server.stop, DRAIN_S), self._answers.drain(DRAIN_S))
        for job in jobs:
            if job.get_name() == "http":
                await asyncio.wait([job])

    def _wake(self, stop: asyncio.Event) -> None:
        """Called in another thread, perhaps after the loop's end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(stop.set)

    def _collect(self) -> tuple[dict[str, float], dict[str, str]]:
        http = {} if self._http is None else self._http.gauges
        return asdict(self._answers.counters) | self._answers.gauges | http, self._labels

    def _handle(self, request: Request) -> None:
        """Called in the socket's thread."""
        if not isinstance(request.message, Chat):
            text = f"the front does not answer {type(request.message).__name__}"
            raise ServiceError(ErrorCode.UNSUPPORTED, text)
        self._loop.call_soon_threadsafe(self._accept, request, request.message)

    def _accept(self, request: Request, chat: Chat) -> None:
        task = self._loop.create_task(self._answer(request, chat))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request, chat: Chat) -> None:
        writer = ChunkWriter()
        try:
            async with self._answers.start(request_of(chat)) as generation:
                self._running[request] = generation
                self._is_busy.set()
                async for events in generation:
                    for event in events:
                        self._tell(request, writer.chunk(event, generation.usage))
        except ServiceError as error:
            request.fail(error.code, error.detail)
        except Exception as error:
            log.exception("request failed")
            request.close(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(request, None)

    def _tell(self, request: Request, chunk: TextChunk | None) -> None:
        if chunk is None:
            return
        if chunk.finish_reason:
            request.reply(chunk)
        else:
            request.stream(chunk)

    async def _watch_cancels(self) -> None:
        """Cancels what nobody wants any more."""
        while True:
            if not self._running:
                self._is_busy.clear()
                await self._is_busy.wait()
            await asyncio.sleep(CANCEL_LOOK_S)
            for request, generation in self._running.items():
                if request.cancelled.is_set():
                    generation.cancel()
