"""The events of a response, read by the `openai` package's own types."""

import itertools

import pytest
from helpers.answers import ARGUMENTS, USAGE, answers, events_of
from hypothesis import given
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.front.generation import Finished, Queued, Started, TextDelta, TokenLogprob, ToolCallDelta
from services.front.http.responses.encoder import ResponseEncoder
from services.front.http.responses.request import read_request
from shared.errors import ErrorCode, ServiceError

STREAM_EVENT = TypeAdapter(ResponseStreamEvent)
HEAD = {"id": "resp_1", "created_at": 1_700_000_000, "model": "demo"} | read_request({"input": "Hello"}).echo


def make_encoder():
    numbers = itertools.count()
    return ResponseEncoder(HEAD, lambda prefix: f"{prefix}_{next(numbers)}")


def encode(events):
    encoder = make_encoder()
    return [out for event in events for out in encoder.encode(event)], encoder.whole


def said_by(item):
    if item["type"] == "function_call":
        return "call", item["arguments"]
    return "text" if item["type"] == "message" else "reasoning", "".join(part["text"] for part in item["content"])


def test_the_whole_sequence():
    stream, response = encode(events_of([("reasoning", "Hm."), ("text", "Let me see."), ("call", ARGUMENTS)], cuts=[3]))
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in stream] == [
        ("created", None),
        ("queued", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("completed", None),
    ]
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert stream[0]["response"]["output"] == []
    assert stream[-1]["response"] == response
    assert [item["status"] for item in response["output"]] == ["completed"] * 3
    call = response["output"][2]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_0", "f0", ARGUMENTS)
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }


@given(answers())
def test_every_split_says_the_same(answer):
    stream, response = encode(answer.events)
    assert [said_by(item) for item in response["output"]] == list(answer.parts)
    read = [STREAM_EVENT.validate_python(event) for event in stream]
    assert read[-1].response == Response.model_validate(response)
    deltas = dict.fromkeys(range(len(answer.parts)), "")
    for event in read:
        if event.type.endswith(".delta"):
            deltas[event.output_index] += event.delta
        elif event.type.endswith(".done") and event.type != "response.output_item.done":
            place = answer.parts[event.output_index][1]
            whole = getattr(event, "text", None) or getattr(event, "arguments", None) or event.part.text
            assert whole == place
    assert list(deltas.values()) == [said for _, said in answer.parts]
    items = [event.item for event in read if event.type == "response.output_item.done"]
    assert items == read[-1].response.output
    ids = [event.item_id for event in read if hasattr(event, "item_id")]
    assert set(ids) <= {item.id for item in items}


def test_an_answer_that_is_too_long_is_incomplete():
    stream, response = encode(events_of([("text", "Hi")], finished=Finished("length", USAGE)))
    assert stream[-1]["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(("reason", "status"), [("length", "incomplete"), ("stop", "completed")])
def test_a_call_that_is_cut_off_is_shown_and_no_part_of_the_whole(reason, status):
    begun = [*events_of([("call", ARGUMENTS)])[:-1], ToolCallDelta(1, "", "call_1", "g"), ToolCallDelta(1, '{"a')]
    stream, response = encode([*begun, Finished(reason, USAGE)])
    for event in stream:
        STREAM_EVENT.validate_python(event)
    item = stream[-2]["item"]
    assert (item["call_id"], item["arguments"], item["status"]) == ("call_1", '{"a', "incomplete")
    assert ([item["call_id"] for item in response["output"]], response["status"]) == (["call_0"], status)


@pytest.mark.parametrize("before", [[], [Queued(1)], [Started(1, 0)], [Started(1, 0), TextDelta("Hi")]])
def test_a_failure_ends_the_stream(before):
    encoder = make_encoder()
    stream = [out for event in before for out in encoder.encode(event)]
    stream += encoder.fail(ServiceError(ErrorCode.PEER_LOST, "the worker went away"))
    read = [STREAM_EVENT.validate_python(event) for event in stream]
    assert (read[0].type, read[-1].type) == ("response.created", "response.failed")
    assert (read[-1].response.status, read[-1].response.error.message) == ("failed", "the worker went away")
    assert [said_by(item) for item in encoder.whole["output"]] == [("text", "Hi")] * (len(before) == 2)


def test_a_cancelled_answer_has_failed():
    for before in (events_of([("text", "Hi")])[:-1], [Queued(0)]):
        stream, response = encode([*before, Finished("abort", USAGE)])
        assert (stream[0]["type"], stream[-1]["type"]) == ("response.created", "response.failed")
        assert response["error"]["message"] == "the request was cancelled"


def test_logprobs_come_with_their_text():
    tokens = [TokenLogprob(b"Hi", -0.5, ((b"Hi", -0.5), (b"Oh", -1.0))), TokenLogprob(b"\xc3", -0.1)]
    likely = [
        {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
        {"token": "Oh", "logprob": -1.0, "bytes": [79, 104]},
    ]
    written = [
        likely[0] | {"top_logprobs": likely},
        {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -0.1, "bytes": [0xC3], "top_logprobs": []},
    ]
    deltas = [TextDelta("Hi", (tokens[0],)), TextDelta("?", (tokens[1],))]
    stream, response = encode([Started(1, 0), *deltas, Finished("stop", USAGE)])
    assert [e["logprobs"] for e in stream if e["type"] == "response.output_text.delta"] == [written[:1], written[1:]]
    (done,) = (e for e in stream if e["type"] == "response.output_text.done")
    assert done["logprobs"] == response["output"][0]["content"][0]["logprobs"] == written
    Response.model_validate(response)


@pytest.mark.parametrize("error", ["", "not JSON"])
def test_says_whether_an_answer_keeps_its_format(error):
    _, response = encode([Started(1, 0), TextDelta("{}"), Finished("stop", USAGE, format_error=error)])
    assert response["response_format"] == {"valid": not error, "error": error or None}
