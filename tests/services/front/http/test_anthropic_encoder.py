"""The events of an answer, read by the `anthropic` package's own types and by its own way of putting them together."""

import json

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from helpers.answers import ARGUMENTS, USAGE, answers, events_of
from hypothesis import given
from pydantic import TypeAdapter

from services.front.generation import Finished, Queued, ToolCallDelta, Usage
from services.front.http.anthropic.encoder import PING, SIGNATURE, MessageEncoder
from shared.errors import ErrorCode, ServiceError

STREAM_EVENT = TypeAdapter(RawMessageStreamEvent)
USED = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 6,
    "output_tokens_details": {"thinking_tokens": 2},
}


def encode(events):
    encoder = MessageEncoder("msg_1", "demo")
    return [out for event in events for out in encoder.encode(event)], encoder.whole


def block_of(kind, said, number):
    if kind == "text":
        return {"type": "text", "text": said}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": said, "signature": SIGNATURE}
    return {"type": "tool_use", "id": f"call_{number}", "name": f"f{number}", "input": json.loads(said)}


def blocks_of(parts):
    calls = [part for part in parts if part[0] == "call"]
    numbers = iter(range(len(calls)))
    return [block_of(kind, said, next(numbers) if kind == "call" else 0) for kind, said in parts]


def test_the_whole_sequence():
    parts = [("reasoning", "Hm."), ("text", "Let me see."), ("call", ARGUMENTS)]
    stream, message = encode(events_of(parts, cuts=[3]))
    kinds = [(e["type"], e.get("index"), e.get("delta", {}).get("type")) for e in stream]
    assert kinds == [
        ("ping", None, None),
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    opened = stream[1]["message"]
    assert (opened["content"], opened["stop_reason"]) == ([], None)
    assert (opened["usage"]["input_tokens"], opened["usage"]["cache_read_input_tokens"]) == (6, 4)
    assert stream[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert stream[-2]["usage"] == USED
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": blocks_of(parts),
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USED,
    }


@given(answers())
def test_the_client_reads_the_same_from_every_split(answer):
    stream, message = encode(answer.events)
    assert message["content"] == blocks_of(answer.parts)
    snapshot, buffers = None, {}
    for event in stream:
        if event != PING:
            snapshot = accumulate_event(
                event=STREAM_EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
    assert snapshot.to_dict(exclude_none=True) == Message.model_validate(message).to_dict(exclude_none=True)


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished("stop", USAGE), "end_turn", None),
        (Finished("stop", USAGE, stop_text="END"), "stop_sequence", "END"),
        (Finished("length", USAGE), "max_tokens", None),
        (Finished("tool_calls", USAGE), "tool_use", None),
        (Finished("abort", USAGE), "pause_turn", None),
    ],
)
def test_why_it_ended(finished, reason, sequence):
    stream, message = encode(events_of([("text", "Hi")], finished=finished))
    assert stream[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("error", ["", "not JSON"])
def test_says_whether_an_answer_keeps_its_format(error):
    stream, message = encode(events_of([("text", "{}")], finished=Finished("stop", USAGE, format_error=error)))
    assert message["response_format"] == {"valid": not error, "error": error or None}
    assert stream[-2]["delta"]["response_format"] == message["response_format"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.PEER_LOST, "overloaded_error"),
        (ErrorCode.NO_CAPACITY, "rate_limit_error"),
        (ErrorCode.TIMEOUT, "timeout_error"),
        (ErrorCode.BAD_REQUEST, "invalid_request_error"),
        (ErrorCode.INTERNAL, "api_error"),
    ],
)
def test_a_failure_is_an_error_event(code, kind):
    (event,) = MessageEncoder("msg_1", "demo").fail(ServiceError(code, "what happened"))
    assert event == {"type": "error", "error": {"type": kind, "message": "what happened"}}
    ErrorResponse.model_validate(event)


def test_a_call_that_is_cut_off_is_shown_and_no_part_of_the_whole():
    begun = [*events_of([("call", ARGUMENTS)])[:-1], ToolCallDelta(1, "", "call_1", "g"), ToolCallDelta(1, '{"a')]
    stream, message = encode([*begun, Finished("length", USAGE)])
    assert [event["type"].removeprefix("content_block_") for event in stream[-6:-2]] == [
        "stop",
        "start",
        "delta",
        "stop",
    ]
    assert stream[-4]["delta"] == {"type": "input_json_delta", "partial_json": '{"a'}
    assert ([block["id"] for block in message["content"]], message["stop_reason"]) == (["call_0"], "max_tokens")


def test_an_empty_answer_has_no_block():
    stream, message = encode(events_of([]))
    assert [event["type"] for event in stream] == ["ping", "message_start", "message_delta", "message_stop"]
    assert message["content"] == []


def test_cancelled_while_it_waited():
    stream, message = encode([Queued(0), Finished("abort", Usage())])
    assert [event["type"] for event in stream] == ["message_start", "message_delta", "message_stop"]
    assert message["stop_reason"] == "pause_turn"


def test_a_request_that_waits_hears_pings():
    encoder = MessageEncoder("msg_1", "demo")
    assert [encoder.encode(Queued(place)) for place in (2, 1, 0)] == [[PING], [PING], []]
