"""The endpoints of Anthropic's API: messages, and counting their tokens."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.front.answers import Generation
from services.front.generation import GenerationRequest
from services.front.http.anthropic.encoder import MessageEncoder
from services.front.http.anthropic.request import read_prompt, read_request
from services.front.http.body import read_json
from services.front.http.cancel import cancel_route
from services.front.http.fields import Fields
from services.front.http.front import Front
from services.front.http.respond import StreamedAnswer, WholeAnswer
from services.front.http.sse import json_bytes, named_frame

PATH = "/v1/messages"
_ID = "msg_"


def routes(front: Front) -> list[Route]:
    counter = front.answers.maker.without_limit()

    def make_encoder(generation: Generation) -> MessageEncoder:
        return MessageEncoder(_ID + generation.id, front.model)

    async def messages(request: Request) -> Response:
        asked = read_request(await read_json(request, front.config.front.max_body_bytes))
        if asked.is_stream:
            return StreamedAnswer(front.answers, asked.generation, make_encoder, named_frame)
        return WholeAnswer(front.answers, asked.generation, make_encoder)

    async def count_tokens(request: Request) -> Response:
        body = Fields(await read_json(request, front.config.front.max_body_bytes))
        prompt = await asyncio.to_thread(counter.make, GenerationRequest(read_prompt(body)))
        return Response(json_bytes({"input_tokens": len(prompt.generate.prompt_ids)}), media_type="application/json")

    return [
        Route(PATH, messages, methods=["POST"]),
        Route(f"{PATH}/count_tokens", count_tokens, methods=["POST"]),
        cancel_route(front, PATH, _ID),
    ]
