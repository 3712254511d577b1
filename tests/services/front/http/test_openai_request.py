"""Bodies of chat and text completions: what they ask for, and what is wrong with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.front.chat.messages import ChatError
from services.front.generation import ANY_FUNCTION, Conversation, GenerationRequest, RawPrompt, Sampling
from services.front.http.openai.request import read_chat, read_completion

HELLO = {"role": "user", "content": "Hello"}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields):
    return read_chat({"model": "m", "messages": [HELLO], **fields})


def conversation(**fields):
    return chat(**fields).generation.prompt


def sampling(**fields):
    return chat(**fields).generation.sampling


def test_nothing_but_messages():
    asked = read_chat({"messages": [HELLO]})
    place = "response_format.json_schema.schema"
    assert asked.generation == GenerationRequest(Conversation((HELLO,), schema_place=place), Sampling())
    assert (asked.is_stream, asked.with_usage) == (False, False)


def said(role, **fields):
    return {"role": role, "content": role, **fields}


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["system", "user"], ["system", "user"]),
        (["developer", "user"], ["system", "user"]),
        (["system", "developer", "user", "developer"], ["system", "system", "user", "user"]),
        (["user", "assistant", "system", "user"], ["user", "assistant", "user", "user"]),
    ],
)
def test_instructions_are_read_in_their_place(roles, expected):
    messages = conversation(messages=[said(role) for role in roles]).messages
    assert messages == tuple(said(role) | {"role": read} for role, read in zip(roles, expected, strict=True))


@pytest.mark.parametrize(
    ("last", "is_continued"),
    [({"prefix": True}, True), ({"prefix": False}, False), ({}, False), ({"prefix": True, "tool_calls": [{}]}, False)],
)
def test_a_last_message_of_the_assistant_is_continued_if_asked_for(last, is_continued):
    messages = [HELLO, said("assistant", **last)]
    assert bool(conversation(messages=messages).messages[-1].get("wo_eos")) is is_continued
    assert "wo_eos" not in messages[-1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.25}, Sampling(0, 0.0, 0.5, 4, 0.25)),
        ({"temperature": None, "top_p": None, "seed": None, "stop": None}, Sampling()),
        ({"max_tokens": 7}, Sampling(7)),
        ({"max_tokens": 7, "max_completion_tokens": 9}, Sampling(9)),
        ({"top_k": -1}, Sampling()),
        ({"seed": 5}, Sampling(seed=5)),
        ({"seed": -5}, Sampling(seed=2**63 - 5)),
        ({"logprobs": True}, Sampling(top_logprobs=0)),
        ({"logprobs": True, "top_logprobs": 3}, Sampling(top_logprobs=3)),
        ({"logprobs": False}, Sampling()),
    ],
)
def test_sampling(fields, expected):
    assert sampling(**fields) == expected


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ([], ()), ("", ()), ("x", ("x",)), (["x", "yz"], ("x", "yz"))]
)
def test_stop(stop, expected):
    assert chat(stop=stop).generation.stop == expected


def test_streams():
    asked = chat(stream=True, stream_options={"include_usage": True})
    assert (asked.is_stream, asked.with_usage) == (True, True)


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, False, None),
        ({"reasoning_effort": "high"}, True, "high"),
        ({"reasoning_effort": "minimal"}, True, "minimal"),
        ({"reasoning_effort": "none"}, False, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, "high"),
        ({"chat_template_kwargs": {"thinking": True}}, True, None),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False, "high"),
    ],
)
def test_thinking(fields, thinking, effort):
    prompt = conversation(**fields)
    assert (prompt.thinking, prompt.effort) == (thinking, effort)


@pytest.mark.parametrize(
    ("fields", "tools", "forced", "max_calls"),
    [
        ({}, (NOW,), None, None),
        ({"tool_choice": "auto"}, (NOW,), None, None),
        ({"tool_choice": "none"}, (), None, 0),
        ({"tool_choice": "required"}, (NOW,), ANY_FUNCTION, None),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, (NOW,), "now", None),
        ({"parallel_tool_calls": False}, (NOW,), None, 1),
    ],
)
def test_tools(fields, tools, forced, max_calls):
    prompt = conversation(tools=[NOW], **fields)
    assert (prompt.tools, prompt.forced_call, prompt.max_calls) == (tools, forced, max_calls)


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, SCHEMA),
    ],
)
def test_response_format(response_format, schema):
    read = conversation(response_format=response_format)
    assert (read.json_schema, read.schema_place) == (schema, "response_format.json_schema.schema")


def test_what_only_concerns_the_vendor_is_ignored():
    ignored = {"user": "u", "store": True, "metadata": {}, "service_tier": "auto", "nonsense": 1, "n": 1}
    assert chat(**ignored) == chat()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"messages": None}, "messages must be a list with at least one"),
        ({"messages": []}, "messages must be a list with at least one"),
        ({"messages": "Hello"}, "messages must be a list, not text"),
        ({"model": 5}, "model must be text"),
        ({"n": 2}, "n can only be 1"),
        ({"n": True}, "n can only be 1"),
        ({"temperature": "hot"}, "temperature must be a number, not text"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": 2.5}, "temperature must be 0 to 2"),
        ({"temperature": 10**400}, "temperature must be 0 to 2, not 1000"),
        ({"temperature": float("nan")}, "temperature must be 0 to 2, not nan"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p must be 0 to 1"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"seed": 2**70}, "seed must be"),
        ({"max_tokens": 0}, "max_tokens must be 1 to"),
        ({"max_completion_tokens": -1}, "max_completion_tokens must be 1 to"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop": ["a", ""]}, r"stop\[1\] must be a text"),
        ({"stop": ["a"] * 17}, "stop can have 16 texts"),
        ({"stop": ["a" * 1001]}, "stop can have 1000 letters"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"stream_options": []}, "stream_options must be an object"),
        ({"stream_options": {"include_usage": 1}}, r"stream_options\.include_usage must be true or false"),
        ({"logprobs": 3}, "logprobs must be true or false"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be 0 to 20"),
        (
            {"reasoning_effort": "huge"},
            "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max, not",
        ),
        ({"thinking": {"type": "maybe"}}, r"thinking\.type must be one of"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, r"chat_template_kwargs\.thinking must be true or false"),
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type must be one of function"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function\.name is missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            r"tools\[0\]\.function\.parameters must be an object, not text",
        ),
        ({"tool_choice": "required"}, "tool_choice is required, but there are no tools"),
        ({"tool_choice": "sometimes"}, "tool_choice must be one of"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "must be one of the tools, not 'f'",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
        ({"response_format": {"type": "xml"}}, r"response_format\.type must be one of"),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema\.schema must be a JSON"),
        ({"functions": [{"name": "f"}]}, r"functions can only be \[\] here \(use tools\)"),
        ({"logit_bias": {"5": 1}}, "logit_bias can only be"),
        ({"frequency_penalty": 0.5}, "frequency_penalty can only be 0"),
        ({"modalities": ["text", "audio"]}, r'modalities can only be \["text"\] here'),
        ({"audio": {"voice": "a"}}, r'audio can only be null here \(this model writes text\), not {"voice": "a"}'),
    ],
)
def test_what_is_wrong_is_named(fields, complaint):
    with pytest.raises(ChatError, match=complaint):
        chat(**fields)


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_is_an_object(body):
    for read in (read_chat, read_completion):
        with pytest.raises(ChatError, match="the body must be an object"):
            read(body)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Once", "Once"), (["Once"], "Once"), ([5, 6], (5, 6)), ([[5, 6]], (5, 6)), ("", "")],
)
def test_raw_prompts(prompt, expected):
    asked = read_completion({"prompt": prompt, "max_tokens": 3, "logprobs": 2, "stop": "x"})
    assert asked.generation == GenerationRequest(RawPrompt(expected), Sampling(3, top_logprobs=2), ("x",))


def test_a_completion_is_short_unless_it_says_otherwise():
    assert read_completion({"prompt": "a"}).generation.sampling == Sampling(16)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": None}, "prompt must be one text"),
        ({"prompt": ["a", "b"]}, "prompt must be one text"),
        ({"prompt": []}, "prompt must be one text"),
        ({"prompt": [1, -2]}, "prompt must be one text"),
        ({"prompt": [1, True]}, "prompt must be one text"),
        ({"prompt": [2**31]}, "prompt must be one text"),
        ({"prompt": "a", "echo": True}, r"echo can only be false here \(.*\), not true$"),
        ({"prompt": "a", "suffix": "b"}, 'suffix can only be "" here'),
        ({"prompt": "a", "best_of": 2}, "best_of can only be 1"),
        ({"prompt": "a", "logprobs": True}, "logprobs must be a whole number"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(fields, complaint):
    with pytest.raises(ChatError, match=complaint):
        read_completion(fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "reasoning_effort",
        "thinking",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "functions",
        "logit_bias",
        "prompt",
        "echo",
        "suffix",
        "best_of",
    ]
)


@given(fields=st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_json_is_read_or_refused_by_name(fields):
    for read in (read_chat, read_completion):
        refusal = ""
        try:
            read({"messages": [HELLO], "prompt": "a", **fields})
        except ChatError as error:
            refusal = str(error)
        assert refusal == "" or refusal.startswith(tuple(fields))
