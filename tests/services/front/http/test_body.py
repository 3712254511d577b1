"""Reading bodies: what arrives in pieces, too long, too slowly, or not at all."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from services.front.chat.messages import ChatError
from services.front.http import body
from services.front.http.body import parse_json, read_json
from services.front.http.errors import CLIENT_GONE, HttpError


def read(pieces, max_bytes=100, headers=(), end=True):
    """What `read_json` makes of a body that comes in these pieces; without `end` the rest never comes."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if end:
        messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
    return asyncio.run(read_json(Request(scope, receive), max_bytes))


def test_pieces_join():
    assert read([b'{"a"', b"", b': "\xc3', b'\xbc"}']) == {"a": "ü"}


@pytest.mark.parametrize(
    "refused",
    [
        lambda: read([b"[", b"1" * 100, b"]"]),
        lambda: read([b"1" * 399, b"1" * 2], end=False),
        lambda: read([], headers=[(b"content-length", b"401")], end=False),
        lambda: read([], headers=[(b"content-length", b"101"), (b"expect", b"100-continue")], end=False),
    ],
)
def test_too_long_is_413_before_it_is_parsed(refused):
    """When the client has said it all, or will be told before it does, or never comes to an end."""
    with pytest.raises(HttpError, match=r"longer than 100 bytes \(front\.max_body_bytes\)") as caught:
        refused()
    assert (caught.value.status, caught.value.headers) == (413, {"connection": "close"})


def test_the_limit_itself_is_not_too_long():
    assert read([b"1" * 100], headers=[(b"content-length", b"100")]) == int("1" * 100)


def test_too_slow_is_408(monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.01)
    with pytest.raises(HttpError, match="did not arrive within") as caught:
        read([b"[1"], end=False)
    assert caught.value.status == 408


def test_a_client_that_goes_away_is_no_bug():
    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(HttpError) as caught:
        asyncio.run(read_json(Request(scope, receive), 100))
    assert caught.value.status == CLIENT_GONE


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "the body is not JSON: Expecting value"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON: 'utf-8'"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b"-Infinity", "-Infinity is no JSON"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b"1" * 5_000, "the body is not JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_json_is_told(data, complaint):
    with pytest.raises(ChatError, match=complaint):
        parse_json(data)


@given(data=st.binary(max_size=40) | st.text(max_size=40).map(lambda t: json.dumps(t).encode()))
def test_any_bytes_are_parsed_or_refused(data):
    try:
        value = parse_json(data)
    except ChatError:
        return
    assert json.loads(data) == value
