"""The front's shell: requests from the socket's thread to the event loop, text back, each to exactly one end.

Owns the queue: as many requests are with the worker as the worker's queue holds, the others wait here in order. Other
ways in (such as HTTP) belong beside this one and share `Answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from services.front.answer import Answer
from services.front.counters import FrontCounters
from services.front.prompt import PromptMaker
from services.front.tokenizer import Tokenizer
from services.front.worker_link import WorkerLink
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

Emit = Callable[[TextChunk], None]


class Answers:
    """Turns `Chat` requests into streams of chunks, whoever asks. Lives in one event loop."""

    def __init__(self, context: ServiceContext, tokenizer: Tokenizer, maker: PromptMaker) -> None:
        self.counters = FrontCounters()
        self.link = WorkerLink(context)
        self._tokenizer = tokenizer
        self._maker = maker
        self._max_queue, max_running = context.config.front.max_queue, context.config.worker.max_queue
        self._max_open = self._max_queue + max_running
        self._turns = asyncio.Semaphore(max_running)
        self._num_open = 0
        self._num_running = 0

    @property
    def gauges(self) -> dict[str, float]:
        return {
            "requests_running": self._num_running,
            "requests_waiting": self._num_open - self._num_running,
            "worker_connected": float(self.link.is_connected),
        }

    async def answer(self, chat: Chat, emit: Emit) -> None:
        """Emit every chunk of an answer, the final one last. If this task is cancelled the answer ends with "abort".

        Raises:
            ServiceError: the request cannot be served; nothing final was emitted.
        """
        if self._num_open >= self._max_open:
            self.counters.requests_refused += 1
            text = f"{self._max_queue} requests wait already (front.max_queue); try again later"
            raise ServiceError(ErrorCode.NO_CAPACITY, text)
        started = time.monotonic()
        answer: Answer | None = None
        self._num_open += 1
        try:
            prompt = await asyncio.to_thread(self._maker.make, chat)
            answer = Answer(prompt, self._tokenizer)
            async with self._turns:
                await self._run(answer, started, emit)
            self._end(answer, emit, answer.end(time.monotonic() - started))
        except asyncio.CancelledError:
            if answer is None:
                self.counters.requests_cancelled += 1
                emit(TextChunk("", "", "", "abort", 0, 0, 0, 0.0, time.monotonic() - started))
            else:
                self._end(answer, emit, answer.end(time.monotonic() - started, "abort"))
        except ServiceError:
            self.counters.requests_failed += 1
            raise
        finally:
            self._num_open -= 1

    async def _run(self, answer: Answer, started: float, emit: Emit) -> None:
        self._num_running += 1
        try:
            async with contextlib.aclosing(self.link.generate(answer.request)) as replies:
                async for tokens in replies:
                    if (chunk := answer.add(tokens, time.monotonic() - started)) is not None:
                        emit(chunk)
                    if answer.is_complete:
                        return
        finally:
            self._num_running -= 1

    def _end(self, answer: Answer, emit: Emit, last: TextChunk) -> None:
        self.counters.count(answer, last.finish_reason)
        emit(last)


class FrontService:
    """The ZeroMQ way in."""

    def __init__(self, context: ServiceContext, answers: Answers, labels: dict[str, str]) -> None:
        self._context = context
        self._answers = answers
        self._labels = labels
        self._loop = asyncio.get_running_loop()
        self._open: dict[asyncio.Task[None], Request] = {}
        self._is_busy = asyncio.Event()
        self._server = Server(context.config.endpoint("front"), context.identity, self._handle)
        self._stats = StatsPublisher(context.config.endpoint("front.stats"), context.identity, self._collect)

    async def run(self) -> None:
        """Serve until the context stops. Raises what makes serving impossible."""
        stop = asyncio.Event()
        self._context.on_stop(lambda: self._wake(stop))
        self._server.start()
        self._stats.start()
        jobs = {
            asyncio.create_task(self._answers.link.keep(), name="worker link"),
            asyncio.create_task(self._watch_cancels(), name="cancels"),
            asyncio.create_task(stop.wait(), name="stop"),
        }
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(self._server.stop, DRAIN_S)
        finally:
            await asyncio.to_thread(self._server.stop)
            for task in (*self._open, *jobs):
                task.cancel()
            await asyncio.gather(*self._open, *jobs, return_exceptions=True)
            self._stats.stop()
        for job in done:
            job.result()

    def _wake(self, stop: asyncio.Event) -> None:
        """Called in another thread, perhaps after the loop's end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(stop.set)

    def _collect(self) -> tuple[dict[str, float], dict[str, str]]:
        return asdict(self._answers.counters) | self._answers.gauges, self._labels

    def _handle(self, request: Request) -> None:
        """Called in the socket's thread."""
        if not isinstance(request.message, Chat):
            text = f"the front does not answer {type(request.message).__name__}"
            raise ServiceError(ErrorCode.UNSUPPORTED, text)
        self._loop.call_soon_threadsafe(self._accept, request, request.message)

    def _accept(self, request: Request, chat: Chat) -> None:
        task = self._loop.create_task(self._answer(request, chat))
        self._open[task] = request
        self._is_busy.set()
        task.add_done_callback(self._open.pop)

    async def _answer(self, request: Request, chat: Chat) -> None:
        def emit(chunk: TextChunk) -> None:
            if chunk.finish_reason:
                request.reply(chunk)
            else:
                request.stream(chunk)

        try:
            await self._answers.answer(chat, emit)
        except ServiceError as error:
            request.fail(error.code, error.detail)
        except Exception as error:
            log.exception("request failed")
            request.close(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")

    async def _watch_cancels(self) -> None:
        """Cancels the tasks of requests that nobody wants any more, each once."""
        cancelled: set[asyncio.Task[None]] = set()
        while True:
            if not self._open:
                self._is_busy.clear()
                await self._is_busy.wait()
            await asyncio.sleep(CANCEL_LOOK_S)
            cancelled &= self._open.keys()
            for task, request in self._open.items():
                if request.cancelled.is_set() and task not in cancelled:
                    cancelled.add(task)
                    task.cancel()
