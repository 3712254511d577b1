"""The endpoint of OpenAI's responses API."""

from __future__ import annotations

import secrets
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.front.answers import Generation
from services.front.http.body import read_json
from services.front.http.cancel import cancel_route
from services.front.http.front import Front
from services.front.http.respond import StreamedAnswer, WholeAnswer
from services.front.http.responses.encoder import ResponseEncoder
from services.front.http.responses.request import read_request
from services.front.http.sse import named_frame

PATH = "/v1/responses"
_ID = "resp_"


def routes(front: Front) -> list[Route]:
    async def responses(request: Request) -> Response:
        asked = read_request(await read_json(request, front.config.front.max_body_bytes))

        def make_encoder(generation: Generation) -> ResponseEncoder:
            head = {"id": _ID + generation.id, "created_at": int(time.time()), "model": front.model}
            return ResponseEncoder(head | asked.echo, _new_id)

        if asked.is_stream:
            return StreamedAnswer(front.answers, asked.generation, make_encoder, named_frame)
        return WholeAnswer(front.answers, asked.generation, make_encoder)

    return [Route(PATH, responses, methods=["POST"]), cancel_route(front, PATH, _ID)]


def _new_id(prefix: str) -> str:
    """An id for a part of a response."""
    return f"{prefix}_{secrets.token_hex(12)}"
