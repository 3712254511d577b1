"""Server-sent events: payloads as the bytes of a stream (html.spec.whatwg.org, section 9.2). Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Payload = dict[str, Any]
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
Frame = Callable[[Payload], bytes]
# Takes the place of a text that is not known yet; nothing else in an event looks like it.
_BLANK = "\0blank\0"


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8; half a surrogate pair, which a client may have sent, becomes an escape."""
    return _JSON.encode(value).encode("utf-8", "backslashreplace")


def data_frame(payload: Payload) -> bytes:
    """An event without a name, as OpenAI's chat completions send it."""
    return b"data: " + json_bytes(payload) + b"\n\n"


def named_frame(payload: Payload) -> bytes:
    """An event that has its payload's `type` for its name."""
    return b"event: " + str(payload["type"]).encode() + b"\ndata: " + json_bytes(payload) + b"\n\n"


class TextFrame:
    """The frame of an event that comes again and again with another text: all but the text is written once."""

    def __init__(self, frame: Frame, payload: Callable[[str], Payload]) -> None:
        """`payload` makes the event for a text, which stands in it once."""
        self._before, self._after = frame(payload(_BLANK)).split(json_bytes(_BLANK))

    def __call__(self, text: str) -> bytes:
        return self._before + json_bytes(text) + self._after


def comment(text: str) -> bytes:
    """A line that clients skip; it keeps connections alive."""
    return b": " + text.encode() + b"\n\n"
