"""Reading a request's JSON body within its limits of size and time."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.types import Receive

from services.front.chat.messages import ChatError
from services.front.http.errors import CLIENT_GONE, HttpError

# From the end of a request's head to the end of its body.
BODY_TIMEOUT_S = 30.0
# A client that is still sending does not hear a refusal, so the rest of a body is read and dropped: up to so many
# times the limit.
PATIENCE = 4


async def read_json(request: Request, max_bytes: int) -> Any:
    """The parsed body, whatever content type it claims.

    Raises:
        ChatError: it is not JSON.
        HttpError: 413 too long, 408 too slow, or the client went away.
    """
    length = request.headers.get("content-length", "")
    waits = request.headers.get("expect", "").lower() == "100-continue"
    if length.isdecimal() and int(length[:20]) > (max_bytes if waits else PATIENCE * max_bytes):
        raise _too_long(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await _read(request.receive, max_bytes)
    except TimeoutError:
        text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise HttpError(HTTPStatus.REQUEST_TIMEOUT, text, connection="close") from None
    return parse_json(data)


def parse_json(data: bytes | bytearray) -> Any:
    """JSON as the standard has it (RFC 8259), in UTF-8. Raises ChatError."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ChatError("the body is nested too deeply") from None
    except ValueError as error:
        raise ChatError(f"the body is not JSON: {error}") from None


async def _read(receive: Receive, max_bytes: int) -> bytearray:
    data, length, more = bytearray(), 0, True
    while more and length <= PATIENCE * max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(CLIENT_GONE, "the client went away")
        piece, more = message.get("body", b""), message.get("more_body", False)
        length += len(piece)
        if length <= max_bytes:
            data += piece
    if length > max_bytes:
        raise _too_long(max_bytes)
    return data


def _too_long(max_bytes: int) -> HttpError:
    text = f"the body is longer than {max_bytes} bytes (front.max_body_bytes)"
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, connection="close")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
