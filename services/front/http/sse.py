"""Server-sent events: payloads as the bytes of a stream (html.spec.whatwg.org, section 9.2). Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Payload = dict[str, Any]
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
Frame = Callable[[Payload], bytes]


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8; half a surrogate pair, which a client may have sent, becomes an escape."""
    return _JSON.encode(value).encode("utf-8", "backslashreplace")


def data_frame(payload: Payload) -> bytes:
    """An event without a name, as OpenAI's chat completions send it."""
    return b"data: " + json_bytes(payload) + b"\n\n"


def named_frame(payload: Payload) -> bytes:
    """An event that has its payload's `type` for its name."""
    return b"event: " + str(payload["type"]).encode() + b"\ndata: " + json_bytes(payload) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip; it keeps connections alive."""
    return b": " + text.encode() + b"\n\n"
