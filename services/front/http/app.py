"""The HTTP application: every dialect's routes, the guard at the door, and errors in the words of who asked."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from services.front.chat.messages import ChatError
from services.front.http.errors import ErrorBody, HttpError, problem_of
from services.front.http.front import Front
from services.front.http.guard import Guard
from services.front.http.openai.errors import error_body
from services.front.http.openai.routes import routes as openai_routes
from services.front.http.sse import json_bytes
from shared.errors import ServiceError

log = logging.getLogger(__name__)

_SERVER_ERROR = 500

# A dialect's errors belong to the paths that begin like this; the first that fits counts.
ERROR_BODIES: tuple[tuple[str, ErrorBody], ...] = (("/", error_body),)


def make_app(front: Front) -> Starlette:
    return Starlette(
        routes=openai_routes(front),
        middleware=[Middleware(Guard, api_key=front.config.front.api_key, explain=explain)],
        exception_handlers=dict.fromkeys((ChatError, ServiceError, HttpError, HTTPException, Exception), explain),
    )


def explain(request: Request, error: Exception) -> Response:
    """The response for an exception of a handler."""
    problem = problem_of(error)
    path = request.url.path
    if problem.status >= _SERVER_ERROR:
        log.warning("request failed path=%s status=%d detail=%r", path, problem.status, str(error))
    body = next(body for beginning, body in ERROR_BODIES if path.startswith(beginning))
    return Response(json_bytes(body(problem)), problem.status, problem.headers, "application/json")
