"""The way to a client that gets a stream: it hears something now and then, and is cut off if it takes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Message, Scope, Send

from services.front.http.sse import comment

log = logging.getLogger(__name__)

# A client that takes nothing for this long is cut off.
STALL_S = 30.0
# So often a client hears something while its request waits or its prompt is read.
KEEP_ALIVE_S = 10.0


class Outlet:
    """Made by `tended`."""

    def __init__(self, send: Send, scope: Scope) -> None:
        state = scope.get("state", {})
        self._send = send
        self._abort: Callable[[], None] = state.get("abort", lambda: None)
        self._unsent: Callable[[], int] = state.get("unsent", int)
        self._is_sending = False
        self._note_progress()

    async def body(self, data: bytes, *, more: bool = True) -> None:
        if data or not more:
            await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def send(self, message: Message) -> None:
        """Waits while the client does not read."""
        self._is_sending = True
        self._note_progress()
        await self._send(message)
        self._is_sending = False
        self._note_progress()

    async def tend(self) -> None:
        """Say something to a client that has heard nothing for a while, and cut off one that does not listen.

        A timer of its own, so that the tokens need none. What counts is whether the client takes anything, however
        slowly, and not whether a message has gone out as a whole.
        """
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            unsent = self._unsent()
            if unsent < self._left:
                self._note_progress()
            age_s = time.monotonic() - self._moved_s
            if self._is_sending or unsent:
                if age_s > STALL_S:
                    log.warning("a client that took nothing for %g s was cut off", STALL_S)
                    self._abort()
                    return
            elif age_s >= KEEP_ALIVE_S:
                await self.body(comment("waiting"))  # goes at once, for nothing is before it

    def _note_progress(self) -> None:
        self._moved_s, self._left = time.monotonic(), self._unsent()


@asynccontextmanager
async def tended(send: Send, scope: Scope) -> AsyncIterator[Outlet]:
    """An outlet and what looks after it."""
    outlet = Outlet(send, scope)
    tending = asyncio.create_task(outlet.tend())
    try:
        yield outlet
    finally:
        tending.cancel()
