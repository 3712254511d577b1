"""Events in the words of chat and text completions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.front.generation import (
    Finished,
    Queued,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallDone,
    Usage,
)
from services.front.http.openai.chat import ChatEncoder
from services.front.http.openai.completion import CompletionEncoder
from shared.errors import ErrorCode, ServiceError

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
COUNTS = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
A = TokenLogprob(b"a", -0.5, ((b"a", -0.5), (b"\xe2", -2.0)))
A_BODY = {
    "token": "a",
    "logprob": -0.5,
    "bytes": [97],
    "top_logprobs": [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "\ufffd", "logprob": -2.0, "bytes": [226]},
    ],
}


def chat_encoder(with_usage=False, with_logprobs=False):
    return ChatEncoder("chatcmpl-1", 99, "m", with_usage=with_usage, with_logprobs=with_logprobs)


def completion_encoder(with_usage=False, with_logprobs=False):
    return CompletionEncoder("cmpl-1", 99, "m", with_usage=with_usage, with_logprobs=with_logprobs)


def encode(encoder, *events):
    return [payload_of(said) for event in events for said in encoder.encode(event)]


def payload_of(said):
    """What a frame holds, where the encoder has made one."""
    return json.loads(said.removeprefix(b"data: ")) if isinstance(said, bytes) else said


def test_a_whole_chat_completion():
    encoder = chat_encoder()
    encode(encoder, Queued(2), Started(7, 3), ReasoningDelta("Hm"), TextDelta("a"), TextDelta("b"))
    encode(encoder, Finished("stop", USAGE))
    message = {"role": "assistant", "content": "ab", "refusal": None, "reasoning_content": "Hm"}
    assert encoder.whole == {
        "id": "chatcmpl-1",
        "created": 99,
        "model": "m",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": COUNTS,
    }


def test_a_streamed_chat_completion():
    chunks = encode(chat_encoder(), Queued(0), Started(7, 3), TextDelta("a"), Finished("length", USAGE))
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "length"]
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {("chatcmpl-1", "chat.completion.chunk", "m")}
    assert all("usage" not in c for c in chunks)


def test_usage_is_a_chunk_of_its_own_when_asked_for():
    chunks = encode(chat_encoder(with_usage=True), Started(7, 3), Finished("stop", USAGE))
    assert [c["usage"] for c in chunks] == [None, None, COUNTS]
    assert chunks[-1]["choices"] == []


def test_calls_whole_and_in_pieces():
    encoder = chat_encoder()
    events = [
        ToolCallDelta(0, '{"a"', "call_0", "f"),
        ToolCallDelta(0, ": 1}"),
        ToolCallDone(0, '{"a": 1}'),
        ToolCallDelta(1, "{}", "call_1", "g"),
        ToolCallDone(1, "{}"),
        Finished("tool_calls", USAGE),
    ]
    chunks = encode(encoder, *events)
    assert [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks[:3]] == [
        {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    message = encoder.whole["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_a_call_that_is_cut_off_is_shown_and_no_part_of_the_whole():
    encoder = chat_encoder()
    done = [ToolCallDelta(0, "{}", "call_0", "f"), ToolCallDone(0, "{}")]
    chunks = encode(encoder, *done, ToolCallDelta(1, '{"a', "call_1", "g"), Finished("length", USAGE))
    assert chunks[1]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] == '{"a'
    (choice,) = encoder.whole["choices"]
    assert ([call["id"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]) == (["call_0"], "length")


def test_logprobs_only_when_asked_for():
    for wanted in (False, True):
        encoder = chat_encoder(with_logprobs=wanted)
        chunks = encode(encoder, TextDelta("a", (A,)), Finished("stop", USAGE))
        expected = {"content": [A_BODY], "refusal": None} if wanted else None
        assert chunks[0]["choices"][0]["logprobs"] == expected
        assert encoder.whole["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize(
    ("finished", "ending"),
    [
        (Finished("stop", USAGE, stop_text="\n"), {"finish_reason": "stop", "stop_reason": "\n"}),
        (Finished("stop", USAGE, format_error=""), {"response_format": {"valid": True, "error": None}}),
        (Finished("stop", USAGE, format_error="not JSON"), {"response_format": {"valid": False, "error": "not JSON"}}),
    ],
)
def test_what_else_an_end_says(finished, ending):
    encoder = chat_encoder()
    (chunk,) = encoder.encode(finished)
    for choice in (chunk["choices"][0], encoder.whole["choices"][0]):
        assert ending.items() <= choice.items()


@pytest.mark.parametrize("make", [chat_encoder, completion_encoder])
def test_a_failure_is_an_error_object(make):
    (body,) = make().fail(ServiceError(ErrorCode.PEER_LOST, "the worker went away"))
    assert body["error"] == {
        "message": "the worker went away",
        "type": "server_error",
        "param": None,
        "code": "peer_lost",
    }


def test_a_whole_text_completion():
    encoder = completion_encoder(with_logprobs=True)
    chunks = encode(encoder, Queued(0), Started(7, 3), TextDelta("a", (A,)), TextDelta("bc"), Finished("length", USAGE))
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "bc", ""]
    assert encoder.whole == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 99,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "abc",
                "logprobs": {
                    "tokens": ["a"],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [{"a": -0.5, "\ufffd": -2.0}],
                    "text_offset": [0],
                },
                "finish_reason": "length",
            }
        ],
        "usage": COUNTS,
    }


def test_offsets_go_on_where_the_last_piece_ended():
    encoder = completion_encoder(with_logprobs=True)
    chunks = encode(encoder, TextDelta("aa", (A, A)), TextDelta("a", (A,)))
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0, 1], [2]]


@given(pieces=st.lists(st.tuples(st.sampled_from(["text", "reasoning"]), st.text(max_size=4)), max_size=8))
def test_the_pieces_together_are_the_whole(pieces):
    kinds = {"text": TextDelta, "reasoning": ReasoningDelta}
    encoder = chat_encoder()
    chunks = encode(encoder, Started(1, 0), *(kinds[kind](text) for kind, text in pieces), Finished("stop", USAGE))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    message = encoder.whole["choices"][0]["message"]
    assert "".join(d.get("content", "") for d in deltas) == message["content"]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message.get("reasoning_content", "")
