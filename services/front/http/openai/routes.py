"""The endpoints of OpenAI's API: chat and text completions, and the list of the one model."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.front.answers import Generation
from services.front.http.body import read_json
from services.front.http.cancel import cancel_route
from services.front.http.errors import HttpError
from services.front.http.front import Front
from services.front.http.openai.chat import ChatEncoder
from services.front.http.openai.completion import CompletionEncoder
from services.front.http.openai.request import Asked, read_chat, read_completion
from services.front.http.respond import StreamedAnswer, WholeAnswer
from services.front.http.sse import data_frame, json_bytes

_DONE = b"data: [DONE]\n\n"
_CHAT, _CHAT_ID = "/v1/chat/completions", "chatcmpl-"
_COMPLETION, _COMPLETION_ID = "/v1/completions", "cmpl-"


def routes(front: Front) -> list[Route]:
    async def chat(request: Request) -> Response:
        asked = read_chat(await read_json(request, front.config.front.max_body_bytes))
        return _respond(front, asked, ChatEncoder, _CHAT_ID)

    async def completion(request: Request) -> Response:
        asked = read_completion(await read_json(request, front.config.front.max_body_bytes))
        return _respond(front, asked, CompletionEncoder, _COMPLETION_ID)

    async def models(request: Request) -> Response:
        paging = {"has_more": False, "first_id": front.model, "last_id": front.model}
        return _json({"object": "list", "data": [_model(front)]} | paging)

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != front.model:
            raise HttpError(HTTPStatus.NOT_FOUND, f"no model {name[:80]!r}; this server has {front.model!r}")
        return _json(_model(front))

    return [
        Route(_CHAT, chat, methods=["POST"]),
        cancel_route(front, _CHAT, _CHAT_ID),
        Route(_COMPLETION, completion, methods=["POST"]),
        cancel_route(front, _COMPLETION, _COMPLETION_ID),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def _respond(front: Front, asked: Asked, encoder: type[ChatEncoder] | type[CompletionEncoder], prefix: str) -> Response:
    created, with_logprobs = int(time.time()), asked.generation.sampling.top_logprobs >= 0

    def make_encoder(generation: Generation) -> ChatEncoder | CompletionEncoder:
        return encoder(
            prefix + generation.id, created, front.model, with_usage=asked.with_usage, with_logprobs=with_logprobs
        )

    if asked.is_stream:
        return StreamedAnswer(front.answers, asked.generation, make_encoder, data_frame, _DONE)
    return WholeAnswer(front.answers, asked.generation, make_encoder)


def _model(front: Front) -> dict[str, object]:
    """OpenAI's fields, vLLM's for the length, and then Anthropic's, whose clients ask at the same address."""
    context = front.config.model.max_context
    return {
        "id": front.model,
        "object": "model",
        "created": front.started,
        "owned_by": "icebox",
        "max_model_len": context,
        "type": "model",
        "display_name": front.model,
        "created_at": datetime.fromtimestamp(front.started, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def _json(value: object) -> Response:
    return Response(json_bytes(value), media_type="application/json")
