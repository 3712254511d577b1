"""Ending an answer from another connection: DELETE on its public id."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.front.http.errors import HttpError
from services.front.http.front import Front
from services.front.http.sse import json_bytes


def cancel_route(front: Front, path: str, prefix: str) -> Route:
    """`path` is where answers are asked for, `prefix` what their public ids add to the generation's."""

    async def cancel(request: Request) -> Response:
        """The answer ends with what it has; 404 if there is none of this id."""
        answer_id = request.path_params["id"]
        generation = front.answers.find(answer_id.removeprefix(prefix))
        if generation is None:
            raise HttpError(HTTPStatus.NOT_FOUND, f"no answer {answer_id[:80]!r} is waiting or being written")
        generation.cancel()
        body = {"id": answer_id, "object": "cancelled", "cancelled": True}
        return Response(json_bytes(body), media_type="application/json")

    return Route(f"{path}/{{id}}", cancel, methods=["DELETE"])
