"""An answer as an HTTP response: as a stream of events, or whole. The same for every dialect.

Before anything is sent, errors go up and become a status; afterwards they are the stream's last event. A client that
goes away cancels its request, whether that waits or runs; one that stops reading is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.front.answers import Answers, Generation
from services.front.generation import Event, GenerationRequest, Queued
from services.front.http.outlet import Outlet, tended
from services.front.http.sse import Frame, Payload, comment, json_bytes
from shared.errors import ServiceError

log = logging.getLogger(__name__)

PLACE_HEADER = "x-queue-place"
ID_HEADER = "x-request-id"


class Encoder(Protocol):
    """One answer in a dialect's words. It gets every event, then `whole` is the complete answer."""

    def encode(self, event: Event) -> Sequence[Payload | bytes]:
        """What the stream says for this event; bytes are frames already."""

    def fail(self, error: ServiceError) -> list[Payload]:
        """What the stream says when its answer fails midway."""

    @property
    def whole(self) -> Payload:
        """The answer that is not streamed; valid after `Finished`."""


# generation -> its encoder; the public id of an answer is made from the generation's
MakeEncoder = Callable[[Generation], Encoder]


class AnswerResponse(Response):
    """Starts a generation when it is sent; what is common to both forms."""

    def __init__(self, answers: Answers, request: GenerationRequest, make_encoder: MakeEncoder) -> None:
        self._answers = answers
        self._request = request
        self._make_encoder = make_encoder
        self.background = None

    @asynccontextmanager
    async def _generation(self, receive: Receive) -> AsyncIterator[Generation]:
        """The running request, cancelled when the client goes away. `http.disconnect` also comes after the end."""
        async with self._answers.start(self._request) as generation:
            watch = asyncio.create_task(_gone(receive))
            watch.add_done_callback(lambda _: generation.cancel())
            try:
                yield generation
            finally:
                watch.cancel()


class WholeAnswer(AnswerResponse):
    """One JSON object."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = 0
        async with self._generation(receive) as generation:
            encoder = self._make_encoder(generation)
            async for events in generation:
                for event in events:
                    if isinstance(event, Queued):
                        place = max(place, event.place)
                    encoder.encode(event)
        headers = _headers(generation, place, b"application/json")
        body = json_bytes(encoder.whole)
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamedAnswer(AnswerResponse):
    """Server-sent events."""

    def __init__(
        self,
        answers: Answers,
        request: GenerationRequest,
        make_encoder: MakeEncoder,
        frame: Frame,
        closing: bytes = b"",
    ) -> None:
        """`frame` makes bytes of a payload; `closing` comes after the last."""
        super().__init__(answers, request, make_encoder)
        self._frame = frame
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation(receive) as generation:
            batches = aiter(generation)
            events = await anext(batches)
            place = events[0].place if isinstance(events[0], Queued) else 0
            headers = _headers(generation, place, b"text/event-stream; charset=utf-8")
            headers.append((b"cache-control", b"no-cache"))
            async with tended(send, scope) as out:
                await out.send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._stream(out, self._make_encoder(generation), events, batches)

    async def _stream(
        self, out: Outlet, encoder: Encoder, events: list[Event], batches: AsyncIterator[list[Event]]
    ) -> None:
        try:
            await out.body(self._bytes(encoder, events))
            async for events in batches:
                await out.body(self._bytes(encoder, events))
        except ServiceError as error:
            log.warning("a stream failed code=%s detail=%r", error.code.value, error.detail)
            await out.body(b"".join(map(self._frame, encoder.fail(error))))
        await out.body(self._closing, more=False)

    def _bytes(self, encoder: Encoder, events: list[Event]) -> bytes:
        data = []
        for event in events:
            if isinstance(event, Queued):
                data.append(comment(f"queue place={event.place}"))
            data += [said if isinstance(said, bytes) else self._frame(said) for said in encoder.encode(event)]
        return b"".join(data)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(generation: Generation, place: int, content_type: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", content_type),
        (PLACE_HEADER.encode(), str(place).encode()),
        (ID_HEADER.encode(), generation.id.encode()),
    ]
