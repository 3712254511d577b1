"""GET /cache: the cache while it changes, as a stream of events for the page.

Each event is a JSON object: `boot_id` and `time_s` of expertd's snapshot, its counters and gauges (`values`, without
those of single layers), its `labels`, and `picture`, in base64 one byte an expert, layer by layer: 128 if it is
resident, plus 0 to 127 for its heat. Counters are cumulative, so a reader may begin anywhere and miss any. Watching
changes nothing in expertd, which publishes the same for nobody; a reader who is slow gets fewer events.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.front.http.front import Front
from services.front.http.outlet import tended
from services.front.http.sse import comment, data_frame
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import StatsSnapshot

# How often a watcher looks for a new snapshot; expertd makes four a second.
LOOK_S = 0.1
# A watcher whose expertd is silent hears something every so many looks.
QUIET_LOOKS = 50
MAX_WATCHERS = 64


class Feed:
    """The watchers of one front. What they get is written once for all of them."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._num_watchers = 0
        self._time_s = 0.0
        self._frame = b""

    def watch(self) -> AsyncIterator[bytes]:
        """A stream for one more watcher. Raises ServiceError: no_capacity."""
        if self._num_watchers >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} pages watch the cache already; close one"
            raise ServiceError(ErrorCode.NO_CAPACITY, text)
        return self._watch()

    async def _watch(self) -> AsyncIterator[bytes]:
        self._num_watchers += 1
        try:
            seen_s, quiet = 0.0, 0
            yield comment("watching")
            while not self._front.answers.is_stopping:
                snapshot = (await self._front.observer.look()).snapshots.get("expertd")
                quiet += 1
                if snapshot is not None and snapshot.time_s != seen_s:
                    seen_s, quiet = snapshot.time_s, 0
                    yield self._frame_of(snapshot)
                elif quiet % QUIET_LOOKS == 0:
                    yield comment("expertd is silent")
                await asyncio.sleep(LOOK_S)
        finally:
            self._num_watchers -= 1

    def _frame_of(self, snapshot: StatsSnapshot) -> bytes:
        if snapshot.time_s != self._time_s:
            self._time_s, self._frame = snapshot.time_s, data_frame(payload(snapshot))
        return self._frame


def payload(snapshot: StatsSnapshot) -> dict[str, object]:
    """What an event says of a snapshot. Pure."""
    return {
        "boot_id": snapshot.boot_id,
        "time_s": snapshot.time_s,
        "values": {key: value for key, value in snapshot.values.items() if "." not in key},
        "labels": snapshot.labels,
        "picture": base64.b64encode(snapshot.picture).decode("ascii"),
    }


class TendedStream(StreamingResponse):
    """A client that takes nothing is cut off."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with tended(send, scope) as outlet:
            await super().__call__(scope, receive, outlet.send)


def routes(front: Front) -> list[Route]:
    feed = Feed(front)

    async def cache(request: Request) -> Response:
        headers = {"cache-control": "no-cache", "content-type": "text/event-stream; charset=utf-8"}
        return TendedStream(feed.watch(), headers=headers)

    return [Route("/cache", cache)]
