"""What goes wrong in HTTP terms: every exception a handler may raise as a status, a code and a sentence. Pure.

How a problem looks in JSON is each dialect's own business.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from services.front.chat.messages import ChatError
from shared.errors import ErrorCode, ServiceError

RETRY_AFTER_S = 2

_STATUS = {
    ErrorCode.BAD_REQUEST: HTTPStatus.BAD_REQUEST,
    ErrorCode.NO_CAPACITY: HTTPStatus.TOO_MANY_REQUESTS,
    ErrorCode.STARTING: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.DRAINING: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.PEER_LOST: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.TIMEOUT: HTTPStatus.GATEWAY_TIMEOUT,
}
_RETRY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_FIELD = re.compile(r"([a-z_]+(?:\.\w+|\[\d+\])*)(?::| must | is missing| can | cannot | is not | needs )")
# The client has gone; nobody reads this status but the log and the counters.
CLIENT_GONE = 499


class HttpError(Exception):
    """A request that is answered with an error before any handler's own work."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True, slots=True)
class Problem:
    """`code` is an `ErrorCode` value, or the status in the same kind of words; `param` the field that is wrong."""

    status: int
    code: str
    message: str
    headers: dict[str, str] = field(default_factory=dict)
    param: str | None = None


# -> the body of an error in one dialect
ErrorBody = Callable[[Problem], dict[str, Any]]


def problem_of(error: Exception) -> Problem:
    """The problem behind an exception; a bug is 500, and says no more than its type."""
    match error:
        case ChatError():
            return _bad_request(str(error))
        case ServiceError(code=ErrorCode.BAD_REQUEST):
            return _bad_request(error.detail)
        case ServiceError():
            status = _STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
            headers = {"retry-after": str(RETRY_AFTER_S)} if status in _RETRY else {}
            return Problem(status, error.code.value, error.detail, headers)
        case HttpError():
            return Problem(error.status, _words(error.status), error.detail, error.headers)
        case HTTPException():
            headers = dict(error.headers or {})
            return Problem(error.status_code, _words(error.status_code), error.detail, headers)
    return Problem(
        HTTPStatus.INTERNAL_SERVER_ERROR, ErrorCode.INTERNAL.value, f"{type(error).__name__}; the log says more"
    )


def _bad_request(text: str) -> Problem:
    """Complaints about a field begin with its path."""
    field = _FIELD.match(text)
    return Problem(HTTPStatus.BAD_REQUEST, ErrorCode.BAD_REQUEST.value, text, param=field[1] if field else None)


def _words(status: int) -> str:
    try:
        return HTTPStatus(status).phrase.lower().replace(" ", "_")
    except ValueError:
        return "client_gone"
