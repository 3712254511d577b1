"""Events that wait for a client to take them. Pure but for the waiting; used by one event loop.

Neighbouring pieces of one kind join, so a client that reads slowly gets fewer and longer pieces, and what waits for it
is bounded by the length of its answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from services.front.generation import Event, Queued, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallDone
from shared.errors import ServiceError

# What one answer may leave unread, in characters of text and, at this price each, log-probabilities.
MAX_UNREAD = 4_000_000
LOGPROB_COST = 100


class EventBuffer:
    """A queue with one writer and one reader. It ends with `close`, or with the error that was given to `fail`."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: ServiceError | None = None

    @property
    def is_full(self) -> bool:
        return self._unread > MAX_UNREAD

    def put(self, event: Event) -> None:
        """What comes after the end is dropped."""
        if self._is_closed:
            return
        self._unread += _size(event)
        joined = _join(self._events[-1], event) if self._events else None
        if joined is not None:
            self._events[-1] = joined
        else:
            self._events.append(event)
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def fail(self, error: ServiceError) -> None:
        """What was put before is still read; then the reader gets the error."""
        self._error = error
        self.close()

    async def take(self) -> list[Event]:
        """All events that wait, once there is one; none after the last.

        Raises:
            ServiceError: what `fail` was given.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                break
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events, self._unread = self._events, [], 0
        return events

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _size(event: Event) -> int:
    match event:
        case TextDelta(text, ()) | ReasoningDelta(text):
            return len(text)
        case TextDelta(text, logprobs):
            return len(text) + sum(LOGPROB_COST * (1 + len(token.top)) for token in logprobs)
        case ToolCallDelta() | ToolCallDone():
            return len(event.arguments)
    return 0


def _join(last: Event, event: Event) -> Event | None:
    """Both as one; None if they do not belong together."""
    match last, event:
        case TextDelta(), TextDelta():
            return TextDelta(last.text + event.text, last.logprobs + event.logprobs)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(last.text + event.text)
        case ToolCallDelta(), ToolCallDelta() if last.index == event.index:
            return replace(last, arguments=last.arguments + event.arguments)
        case Queued(), Queued():
            return event
    return None
