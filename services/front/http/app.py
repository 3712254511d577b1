"""The HTTP application: every dialect's routes, the guard at the door, and errors in the words of who asked."""

from __future__ import annotations

import logging
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from services.front.chat.messages import ChatError
from services.front.http.anthropic.errors import error_body as anthropic_error_body
from services.front.http.anthropic.routes import PATH as ANTHROPIC_PATH
from services.front.http.anthropic.routes import routes as anthropic_routes
from services.front.http.errors import ErrorBody, HttpError, problem_of
from services.front.http.feed import routes as feed_routes
from services.front.http.front import Front
from services.front.http.guard import Guard
from services.front.http.metrics import CountResponses
from services.front.http.openai.errors import error_body as openai_error_body
from services.front.http.openai.routes import routes as openai_routes
from services.front.http.operations import routes as operations_routes
from services.front.http.page import routes as page_routes
from services.front.http.responses.routes import routes as responses_routes
from services.front.http.sse import json_bytes
from shared.errors import ServiceError

log = logging.getLogger(__name__)

_SERVER_ERROR = 500

# A dialect's errors belong to the paths that begin like this; the first that fits counts.
ERROR_BODIES: tuple[tuple[str, ErrorBody], ...] = (
    (ANTHROPIC_PATH, anthropic_error_body),
    ("/", openai_error_body),
)


def make_app(front: Front) -> Starlette:
    return Starlette(
        routes=[
            *openai_routes(front),
            *responses_routes(front),
            *anthropic_routes(front),
            *operations_routes(front),
            *feed_routes(front),
            *page_routes(),
        ],
        middleware=[
            Middleware(CountResponses, metrics=front.metrics),
            Middleware(Guard, api_key=front.config.front.api_key, explain=explain),
        ],
        exception_handlers=dict.fromkeys((ChatError, ServiceError, HttpError, HTTPException, Exception), explain),
    )


def explain(request: Request, error: Exception) -> Response:
    """The response for an exception of a handler."""
    problem, path = problem_of(error), request.url.path
    if isinstance(error, HTTPException):  # the router's own words do not name the path
        problem = replace(problem, message=f"{problem.message}: {request.method} {path[:200]}")
    if problem.status >= _SERVER_ERROR:
        log.warning("request failed path=%s status=%d detail=%r", path, problem.status, str(error))
    body = next(body for beginning, body in ERROR_BODIES if path.startswith(beginning))
    return Response(json_bytes(body(problem)), problem.status, problem.headers, "application/json")
