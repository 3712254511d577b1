"""The front's connection to the worker: kept, watched, and made again after a loss.

A request that ran when the worker went away is lost and says so; nothing is sent twice. Knows no text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Generate, Ping, TokensGenerated
from shared.runtime.context import ServiceContext
from shared.transport.client import AsyncClient

log = logging.getLogger(__name__)

CONNECT_S = 0.5
RETRY_S = 0.05
PING_INTERVAL_S = 1.0
# A worker that does not answer for this long hangs; a long step does not delay its answer.
PING_TIMEOUT_S = 5.0
# A worker whose queue was full is asked again after this long, then after twice that, up to the longest.
FULL_RETRY_S = 0.02
LONGEST_FULL_RETRY_S = 1.0
# A full queue is reported within milliseconds; after this long without a reply the worker has taken the request.
TAKEN_S = 0.1


class WorkerLink:
    """At most one connection at a time. `keep` must run for the others to work."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._client = AsyncClient(context.config.endpoint("worker"), context.identity)
        # Held by the one request that asks a full worker again. asyncio gives it to the waiting in their order.
        self._turn = asyncio.Lock()

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    def absent(self) -> ServiceError:
        """What is wrong while there is no connection."""
        return ServiceError(ErrorCode.STARTING, "the worker is not there yet; `icebox status` says what it does")

    async def keep(self) -> None:
        """Connect, watch, connect again: until cancelled. The service is ready while there is a worker.

        Raises:
            ServiceError: the worker speaks another version of the protocol.
        """
        try:
            while True:
                self._context.progress("waiting for the worker")
                await self._connect()
                self._context.ready()
                try:
                    await self._watch()
                except ServiceError as error:
                    log.log(self._context.failure_level, "worker lost detail=%r", error.detail)
                    self._client.close()
        finally:
            self._client.close()

    async def _connect(self) -> None:
        while True:
            try:
                await self._client.connect(CONNECT_S)
                return
            except PeerLost:
                await asyncio.sleep(RETRY_S)

    async def _watch(self) -> None:
        """Returns never; raises ServiceError when the worker is gone or hangs."""
        while True:
            await self._client.call(Ping(), PING_TIMEOUT_S)
            if await self._client.is_lost_within(PING_INTERVAL_S):
                raise PeerLost("the connection closed")

    async def generate(self, request: Generate, take: Callable[[TokensGenerated], bool]) -> None:
        """Hand the worker's replies to one request to `take`, the final one last, until it wants no more.

        A full queue is no failure: the worker is asked again until it takes the request, and whoever came later waits
        until then. Cancelling this cancels it.

        Raises:
            ServiceError: the worker's own error, what `take` raises, or `starting` if there is no worker.
            PeerLost: the worker went away before the end.
        """
        async with self._turn:
            pass
        is_taken = await self._ask(request, take)
        while not is_taken:
            async with self._turn:
                asked = await self._ask_until_taken(request, take)
            is_taken = await asked

    async def _ask_until_taken(self, request: Generate, take: Callable[[TokensGenerated], bool]) -> asyncio.Task[bool]:
        """The running `_ask` that has ended with an answer or an error, or was not refused within TAKEN_S."""
        delay = FULL_RETRY_S
        while True:
            await self._client.is_lost_within(delay)
            asked = asyncio.create_task(self._ask(request, take))
            try:
                await asyncio.wait({asked}, timeout=TAKEN_S)
            except asyncio.CancelledError:
                asked.cancel()
                raise
            if not asked.done() or asked.exception() is not None or asked.result():
                return asked
            delay = min(2 * delay, LONGEST_FULL_RETRY_S)

    async def _ask(self, request: Generate, take: Callable[[TokensGenerated], bool]) -> bool:
        """One request to its end, as `generate` says; False if the worker's queue is full."""
        has_begun = False

        def begin(reply: object) -> bool:
            nonlocal has_begun
            assert isinstance(reply, TokensGenerated)
            has_begun = True
            return take(reply)

        if not self.is_connected:
            raise self.absent()
        try:
            await self._client.stream(request, begin)
        except PeerLost:
            raise PeerLost("the worker went away while this request ran; it is not repeated") from None
        except ServiceError as error:
            if has_begun or error.code is not ErrorCode.NO_CAPACITY:
                raise
            return False
        return True
