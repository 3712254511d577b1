import pytest

from services.front.chat.messages import ChatError
from services.front.generation import ANY_FUNCTION, Sampling
from services.front.http.responses.request import read_request

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA}


def read(**more):
    return read_request({"model": "demo", "input": "Hello"} | more)


def prompt(**more):
    return read(**more).generation.prompt


def test_the_least():
    request = read()
    assert not request.is_stream
    assert request.generation.sampling == Sampling()
    assert request.generation.prompt.messages == ({"role": "user", "content": "Hello"},)
    assert request.echo["tool_choice"] == "auto"
    assert request.echo["max_output_tokens"] is None


def test_everything():
    given = {
        "instructions": "Be brief.",
        "max_output_tokens": 20,
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "store": True,
        "stream": True,
        "service_tier": "auto",
        "include": ["reasoning.encrypted_content"],
    }
    request = read(**given)
    assert request.is_stream
    assert request.generation.sampling == Sampling(max_tokens=20, temperature=0.5, top_p=0.9)
    assert request.generation.prompt.messages[0] == {"role": "system", "content": "Be brief."}
    repeated = {key: request.echo[key] for key in given if key in request.echo}
    assert repeated == {key: given[key] for key in repeated}
    assert len(repeated) == 5


def test_tools_become_functions():
    function = {"name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA}
    assert prompt(tools=[TOOL]).tools == ({"type": "function", "function": function},)
    (tool,) = prompt(tools=[{"type": "function", "name": "f", "parameters": None, "strict": True}]).tools
    assert tool["function"] == {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("given", "forced", "max_calls", "num_tools"),
    [
        ({}, None, None, 1),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, None, 1, 1),
        ({"tool_choice": "required"}, ANY_FUNCTION, None, 1),
        ({"tool_choice": {"type": "function", "name": "get_weather"}}, "get_weather", None, 1),
        ({"tool_choice": "none"}, None, 0, 0),
    ],
)
def test_tool_choice(given, forced, max_calls, num_tools):
    read_prompt = prompt(tools=[TOOL], **given)
    assert (read_prompt.forced_call, read_prompt.max_calls, len(read_prompt.tools)) == (forced, max_calls, num_tools)


@pytest.mark.parametrize(
    ("reasoning", "expected"),
    [
        (None, (False, None)),
        ({"effort": "none"}, (False, None)),
        ({"effort": "minimal"}, (True, "minimal")),
        ({"effort": "high", "summary": "auto"}, (True, "high")),
        ({"summary": "auto"}, (True, None)),
    ],
)
def test_reasoning(reasoning, expected):
    read_prompt = prompt(reasoning=reasoning)
    assert (read_prompt.thinking, read_prompt.effort) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, -1),
        ({"top_logprobs": 0}, 0),
        ({"top_logprobs": 3}, 3),
        ({"include": ["reasoning.encrypted_content"]}, -1),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
    ],
)
def test_logprobs(given, expected):
    assert read(**given).generation.sampling.top_logprobs == expected


@pytest.mark.parametrize(
    ("text_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA}, SCHEMA),
    ],
)
def test_output_format(text_format, expected):
    read = prompt(text={"format": text_format})
    assert (read.json_schema, read.schema_place) == (expected, "text.format.schema")


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported: responses are not stored here"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"prompt": {"id": "x"}}, "prompt is not supported"),
        ({"input": None}, "input must end with"),
        ({"input": 3}, "input must be a list"),
        ({"model": 3}, "model must be text"),
        ({"max_output_tokens": 0}, "max_output_tokens must be 1 to"),
        ({"top_logprobs": 21}, "top_logprobs must be 0 to 20"),
        ({"temperature": -1}, "temperature must be 0 to 2"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort must be one of"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type: only function tools are supported"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name is missing"),
        ({"tool_choice": "some"}, "tool_choice must be one of auto, none, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type must be one of function"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type must be one of"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be an object"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
    ],
)
def test_complaints_name_the_field(more, complaint):
    with pytest.raises(ChatError, match=f"^{complaint}"):
        read(**more)
