"""Bodies of every dialect with one place changed to anything: each is understood, or refused with a reason."""

import copy
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demo.corpus import HERE, chat_format
from services.front.chat.messages import ChatError, read_turns
from services.front.http.anthropic.request import read_request as read_messages
from services.front.http.openai.request import read_chat, read_completion
from services.front.http.responses.request import read_request as read_responses
from services.front.prompt import PromptMaker
from services.front.tokenizer import Tokenizer
from shared.errors import ErrorCode, ServiceError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
COMMON = {"model": "demo", "temperature": 0.5, "top_p": 0.9, "stream": True}

CHAT = COMMON | {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "reasoning_effort": "low",
    "stop": ["a", "b"],
    "seed": 7,
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
}
COMPLETION = COMMON | {"prompt": ["Once"], "max_tokens": 5, "logprobs": 1, "stop": "x"}
MESSAGES = COMMON | {
    "max_tokens": 10,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": [], "is_error": True}],
        },
    ],
    "tools": [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["a"],
    "top_k": 5,
}
RESPONSES = COMMON | {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "rain"}]},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 10,
    "parallel_tool_calls": False,
}
DIALECTS = {
    "chat": (read_chat, CHAT),
    "completion": (read_completion, COMPLETION),
    "messages": (read_messages, MESSAGES),
    "responses": (read_responses, RESPONSES),
}

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
WORDS = st.sampled_from(
    ["user", "assistant", "system", "tool", "text", "auto", "none", "required", "", "\ud800", "</think>"]
)
VALUES = st.recursive(
    LEAVES | WORDS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8) | WORDS, v, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def maker():
    return PromptMaker(Tokenizer.load(HERE / "checkpoint"), chat_format(), max_context=512, default_max_tokens=16)


def changed(body, draw):
    """A copy with one place, however deep, made another value or left out."""
    body = copy.deepcopy(body)
    inner = body
    while True:
        key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        if isinstance(inner[key], dict | list) and inner[key] and draw(st.booleans()):
            inner = inner[key]
        elif draw(st.integers(0, 3)):
            inner[key] = draw(VALUES)
            return body
        else:
            del inner[key]
            return body


def verdict(maker, read, body):
    """Why it is refused; None if it is not."""
    try:
        assert maker.make(read(body).generation).generate.prompt_ids
    except ChatError:
        return ErrorCode.BAD_REQUEST
    except ServiceError as error:
        return error.code
    return None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_unchanged_body_is_good(maker, dialect):
    read, body = DIALECTS[dialect]
    assert verdict(maker, read, body) is None


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_body_is_understood_or_refused(maker, dialect, data):
    read, body = DIALECTS[dialect]
    assert verdict(maker, read, changed(body, data.draw)) in (None, ErrorCode.BAD_REQUEST)


@pytest.mark.parametrize("kind", ["user", "assistant", "system"])
def test_many_small_pieces_cost_no_more_than_their_number(kind):
    """Four times as many take about four times as long, not sixteen."""

    def seconds(number):
        pieces = [{"role": kind, "content": "x"}] * number
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            read_turns(
                read_responses({"input": [*pieces, {"role": "user", "content": "x"}]}).generation.prompt.messages
            )
            best = min(best, time.process_time() - started)
        return best

    assert seconds(20_000) < 9 * seconds(5_000)
