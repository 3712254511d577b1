"""Errors as OpenAI's API writes them. Pure."""

from __future__ import annotations

from typing import Any

from services.front.http.errors import Problem

_SERVER = 500
_LIMITED = 429


def error_body(problem: Problem) -> dict[str, Any]:
    """Format: the `error` object of OpenAI's API reference, "Error codes"."""
    kind = "server_error" if problem.status >= _SERVER else "invalid_request_error"
    if problem.status == _LIMITED:
        kind = "rate_limit_error"
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}
