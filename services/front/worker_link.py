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
# How long to wait before asking a worker again whose queue was full.
FULL_RETRY_S = 0.02


class WorkerLink:
    """At most one connection at a time. `keep` must run for the others to work."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._client = AsyncClient(context.config.endpoint("worker"), context.identity)

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
                    log.warning("worker lost detail=%r", error.detail)
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

        A full queue is no failure: the worker is asked again until it takes the request. Cancelling this cancels it.

        Raises:
            ServiceError: the worker's own error, what `take` raises, or `starting` if there is no worker.
            PeerLost: the worker went away before the end.
        """
        has_begun = False

        def begin(reply: object) -> bool:
            nonlocal has_begun
            assert isinstance(reply, TokensGenerated)
            has_begun = True
            return take(reply)

        while True:
            if not self.is_connected:
                raise self.absent()
            try:
                return await self._client.stream(request, begin)
            except PeerLost:
                raise PeerLost("the worker went away while this request ran; it is not repeated") from None
            except ServiceError as error:
                if has_begun or error.code is not ErrorCode.NO_CAPACITY:
                    raise
            await asyncio.sleep(FULL_RETRY_S)
