"""Requests on their way to the worker and answers on their way back, whoever asks. Lives in one event loop.

Owns the queue: as many requests are with the worker as the worker's queue holds, the others wait here in order.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType

from services.front.answer import Answer
from services.front.buffer import EventBuffer
from services.front.counters import FrontCounters
from services.front.generation import Conversation, Event, Finished, GenerationRequest, Queued, Started, Usage, is_short
from services.front.prompt import Prompt, PromptMaker
from services.front.schema import check_format, check_schema
from services.front.tokenizer import Tokenizer
from services.front.worker_link import WorkerLink
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import TokensGenerated
from shared.runtime.context import ServiceContext

log = logging.getLogger(__name__)


class Generation:
    """One request from its acceptance to its end: an `async with` block, in which its events are iterated, several
    at a time where the reader is slower than the model.

    Leaving the block early cancels it. It runs at the worker's pace, not at the reader's; a reader who falls so far
    behind that the buffer is full loses it.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.id = secrets.token_hex(12)
        self.request = request
        self._accepted = time.monotonic()
        self._buffer = EventBuffer()
        self._place: int | None = None
        self._is_waiting = True
        self._has_begun = False
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._answer: Answer | None = None

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage() if self._answer is None else self._answer.usage

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._accepted

    def cancel(self) -> None:
        """End it within one step of the worker: the last event is then `Finished("abort")`. Idempotent."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        if self._task is not None and self._has_begun:
            self._task.cancel()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        """Whatever has happened since the last look. Raises ServiceError if the request fails."""
        while events := await self._buffer.take():
            yield events

    # --- the other side, for Answers -----------------------------------------------------------------------------

    def begin(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def show(self, answer: Answer) -> None:
        """The answer that is being made."""
        self._answer = answer

    def check_cancelled(self) -> None:
        """Called first by the task: a task that is cancelled before its first step never runs at all."""
        self._has_begun = True
        if self._is_cancelled:
            raise asyncio.CancelledError

    @property
    def is_unread(self) -> bool:
        """The reader is too far behind."""
        return self._buffer.is_full

    def emit(self, event: Event) -> None:
        if isinstance(event, Started):
            self._is_waiting = False
        self._buffer.put(event)

    def stand(self, place: int) -> None:
        """So many requests are before this one now."""
        if self._is_waiting and place != self._place:
            self._place = place
            self._buffer.put(Queued(place))

    def fail(self, error: ServiceError) -> None:
        self._buffer.fail(error)

    def close(self) -> None:
        self._buffer.close()


class Answers:
    """Turns requests into streams of events."""

    def __init__(self, context: ServiceContext, tokenizer: Tokenizer, maker: PromptMaker) -> None:
        self.counters = FrontCounters()
        self.link = WorkerLink(context)
        self.maker = maker
        self._tokenizer = tokenizer
        self._timeout_s = context.config.front.request_timeout_s
        self._max_queue, max_running = context.config.front.max_queue, context.config.worker.max_queue
        self._max_open = self._max_queue + max_running
        self._turns = asyncio.Semaphore(max_running)
        self._open: dict[str, Generation] = {}
        self._queue: dict[str, Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self._is_stopping = False

    @property
    def gauges(self) -> dict[str, float]:
        return {
            "requests_running": self._num_running,
            "requests_waiting": len(self._open) - self._num_running,
            "worker_connected": float(self.link.is_connected),
        }

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def start(self, request: GenerationRequest) -> Generation:
        """Accept a request and begin to work on it.

        Raises:
            ServiceError: no_capacity, the queue is full; starting, there is no worker; draining.
        """
        self._check_open()
        if not self.link.is_connected:
            self.counters.requests_failed += 1
            raise self.link.absent()
        generation = Generation(request)
        self._open[generation.id] = generation
        task = asyncio.create_task(self._answer(generation), name=f"answer {generation.id}")
        generation.begin(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    def find(self, generation_id: str) -> Generation | None:
        """The request of this id, if it has not ended."""
        return self._open.get(generation_id)

    async def prompt(self, request: GenerationRequest) -> Prompt:
        """What the worker would be asked. Raises ServiceError: bad_request."""
        chat = request.prompt
        if isinstance(chat, Conversation) and chat.json_schema is not None:
            await check_schema(chat.json_schema, chat.schema_place)
        if is_short(request):
            return self.maker.make(request)
        return await asyncio.to_thread(self.maker.make, request)

    async def drain(self, seconds: float) -> None:
        """Refuse what comes, and end what runs: by itself in this time, or with `draining` afterwards."""
        self._is_stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for generation in self._open.values():
            generation.fail(_draining())
            generation.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _check_open(self) -> None:
        if self._is_stopping:
            raise _draining()
        if len(self._open) >= self._max_open:
            self.counters.requests_refused += 1
            text = f"{self._max_queue} requests wait already (front.max_queue); try again later"
            raise ServiceError(ErrorCode.NO_CAPACITY, text)

    async def _answer(self, generation: Generation) -> None:
        """One request to its end: `Finished`, or an error."""
        answer: Answer | None = None
        try:
            generation.check_cancelled()
            async with asyncio.timeout(self._timeout_s):
                answer = Answer(await self.prompt(generation.request), self._tokenizer)
                generation.show(answer)
                self._enter(generation)
                async with self._turns:
                    await self._run(generation, answer)
            await self._finish(generation, answer)
        except asyncio.CancelledError:
            if answer is not None:
                self._end(generation, answer, answer.end(generation.age_s, "abort"))
            else:
                self.counters.requests_cancelled += 1
                generation.emit(Finished("abort", Usage(elapsed_s=generation.age_s)))
        except TimeoutError:
            text = f"no complete answer within {self._timeout_s} s (front.request_timeout_s)"
            self._fail(generation, ServiceError(ErrorCode.TIMEOUT, text))
        except ServiceError as error:
            self._fail(generation, error)
        except Exception as error:
            log.exception("request failed")
            self._fail(generation, ServiceError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))
        finally:
            generation.close()
            self._leave(generation)

    async def _run(self, generation: Generation, answer: Answer) -> None:
        def take(tokens: TokensGenerated) -> bool:
            for event in answer.add(tokens, generation.age_s):
                generation.emit(event)
            if generation.is_unread:
                raise ServiceError(ErrorCode.NO_CAPACITY, "the answer comes faster than it is read")
            return not answer.is_complete

        self._num_running += 1
        try:
            await self.link.generate(answer.generate, take)
        finally:
            self._num_running -= 1

    async def _finish(self, generation: Generation, answer: Answer) -> None:
        """The text is shown before it is checked, which may take a while."""
        *events, last = answer.end(generation.age_s)
        for event in events:
            generation.emit(event)
        assert isinstance(last, Finished)
        if answer.json_schema is not None:
            last = replace(last, format_error=await check_format(answer.text, answer.json_schema))
        self._end(generation, answer, [last])

    def _end(self, generation: Generation, answer: Answer, events: Sequence[Event]) -> None:
        last = events[-1]
        assert isinstance(last, Finished)
        self.counters.count(answer, last.reason)
        for event in events:
            generation.emit(event)

    def _fail(self, generation: Generation, error: ServiceError) -> None:
        self.counters.requests_failed += 1
        generation.fail(error)

    def _enter(self, generation: Generation) -> None:
        """Into the queue. The first event says that the request is a good one, and how many are before it."""
        generation.stand(len(self._queue))
        self._queue[generation.id] = generation

    def _leave(self, generation: Generation) -> None:
        del self._open[generation.id]
        if self._queue.pop(generation.id, None) is not None:
            for place, other in enumerate(self._queue.values()):
                other.stand(place)


def _draining() -> ServiceError:
    return ServiceError(ErrorCode.DRAINING, "the front is stopping")
