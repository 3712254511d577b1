"""The front's connection to the worker: kept, watched, and made again after a loss.

A request that ran when the worker went away is lost and says so; nothing is sent twice. Knows no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Generate, Ping, TokensGenerated
from shared.runtime.context import ServiceContext
from shared.transport.client import AsyncClient

log = logging.getLogger(__name__)

CONNECT_S = 0.5
LOOK_S = 0.05
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
                await asyncio.sleep(LOOK_S)

    async def _watch(self) -> None:
        """Returns never; raises ServiceError when the worker is gone or hangs."""
        while True:
            await self._client.call(Ping(), PING_TIMEOUT_S)
            next_ping = time.monotonic() + PING_INTERVAL_S
            while time.monotonic() < next_ping:
                if not self.is_connected:
                    raise PeerLost("the connection closed")
                await asyncio.sleep(LOOK_S)

    async def generate(self, request: Generate) -> AsyncGenerator[TokensGenerated, None]:
        """The worker's replies to one request, the final one last; closing this early cancels it.

        A full queue is no failure: the worker is asked again until it takes the request.

        Raises:
            ServiceError: the worker's own error, or `starting` if there is no worker.
            PeerLost: the worker went away before the end.
        """
        while True:
            has_begun = False
            replies = self._stream(request)
            try:
                async for reply in replies:
                    assert isinstance(reply, TokensGenerated)
                    has_begun = True
                    yield reply
                return
            except ServiceError as error:
                if has_begun or error.code is not ErrorCode.NO_CAPACITY:
                    raise
            finally:
                await replies.aclose()
            await asyncio.sleep(FULL_RETRY_S)

    async def _stream(self, request: Generate) -> AsyncGenerator[object, None]:
        if not self.is_connected:
            raise self.absent()
        try:
            async with contextlib.aclosing(self._client.stream(request)) as replies:
                async for reply in replies:
                    yield reply
        except PeerLost:
            raise PeerLost("the worker went away while this request ran; it is not repeated") from None
