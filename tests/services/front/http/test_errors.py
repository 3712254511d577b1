"""Exceptions as statuses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from services.front.chat.messages import ChatError
from services.front.http.errors import HttpError, Problem, problem_of
from services.front.http.openai.errors import error_body
from services.front.http.sse import TextFrame, comment, data_frame, json_bytes, named_frame
from shared.errors import ErrorCode, ServiceError


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        (ErrorCode.BAD_REQUEST, 400, False),
        (ErrorCode.NO_CAPACITY, 429, True),
        (ErrorCode.STARTING, 503, True),
        (ErrorCode.DRAINING, 503, True),
        (ErrorCode.PEER_LOST, 503, True),
        (ErrorCode.TIMEOUT, 504, False),
        (ErrorCode.IO_ERROR, 500, False),
        (ErrorCode.INTERNAL, 500, False),
        (ErrorCode.VERSION, 500, False),
    ],
)
def test_every_code_has_a_status(code, status, retry):
    problem = problem_of(ServiceError(code, "why"))
    assert (problem.status, problem.code, problem.message) == (status, code.value, "why")
    assert ("retry-after" in problem.headers) == retry


def test_other_exceptions():
    assert problem_of(HttpError(413, "long", connection="close")) == Problem(
        413, "request_entity_too_large", "long", {"connection": "close"}
    )
    assert problem_of(HTTPException(405, headers={"allow": "GET"})).headers == {"allow": "GET"}
    bug = problem_of(ZeroDivisionError("secret"))
    assert (bug.status, bug.code) == (500, "internal")
    assert "secret" not in bug.message


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("temperature must be a number, not text", "temperature"),
        ("messages[0].content[1]: only parts of type text are supported", "messages[0].content[1]"),
        ("response_format.json_schema.schema is not a usable JSON schema: x", "response_format.json_schema.schema"),
        ("n can only be 1 here", "n"),
        ("the body is not JSON: x", None),
        ("the prompt has 600 tokens, but model.max_context = 512", None),
    ],
)
def test_the_field_that_is_wrong_is_named(text, param):
    assert problem_of(ChatError(text)).param == param
    assert problem_of(ServiceError(ErrorCode.BAD_REQUEST, text)).param == param


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_openai_error_objects(status, kind):
    body = error_body(Problem(status, "code", "text", param="n"))
    assert body == {"error": {"message": "text", "type": kind, "param": "n", "code": "code"}}


def test_frames():
    payload = {"type": "x", "text": "ü\n\ndata: \ud800"}
    text = '{"type":"x","text":"ü\\n\\ndata: \\ud800"}'
    assert json_bytes(payload).decode() == text
    assert json.loads(json_bytes(payload)) == payload
    assert data_frame(payload).decode() == f"data: {text}\n\n"
    assert named_frame(payload).decode() == f"event: x\ndata: {text}\n\n"
    assert comment("x") == b": x\n\n"


@given(st.text(st.characters(exclude_categories=())))
def test_a_frame_with_another_text_is_what_its_payload_would_be(text):
    def payload(text):
        return {"type": "x", "delta": {"text": text, "end": None}, "model": 'a "name"'}

    for frame in (data_frame, named_frame):
        assert TextFrame(frame, payload)(text) == frame(payload(text))
