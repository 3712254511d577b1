"""Errors as Anthropic's API writes them. Pure."""

from __future__ import annotations

from typing import Any

from services.front.http.errors import Problem

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVER = 500


def error_body(problem: Problem) -> dict[str, Any]:
    """Format: platform.claude.com/docs/en/api/errors; the same within a stream."""
    kind = _KINDS.get(problem.status, "api_error" if problem.status >= _SERVER else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}
