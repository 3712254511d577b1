import pytest

from services.front.chat.messages import ChatError
from services.front.generation import ANY_FUNCTION, Sampling
from services.front.http.anthropic.request import LOW_BUDGET, read_request

HELLO = {"model": "demo", "max_tokens": 10, "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA}


def read(**more):
    return read_request(HELLO | more)


def test_the_least():
    request = read()
    generation = request.generation
    assert (request.is_stream, generation.stop) == (False, ())
    assert generation.sampling == Sampling(max_tokens=10)
    assert generation.prompt.messages == ({"role": "user", "content": "Hello"},)
    assert not generation.prompt.thinking


def test_everything():
    request = read(
        stream=True,
        temperature=0,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END", "."],
        metadata={"user_id": "x"},
        unknown_field=3,
    )
    assert request.is_stream
    assert request.generation.sampling == Sampling(max_tokens=10, temperature=0.0, top_p=0.9, top_k=5)
    assert request.generation.stop == ("END", ".")


def test_tools_become_functions():
    function = {"name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA}
    assert read(tools=[TOOL]).generation.prompt.tools == ({"type": "function", "function": function},)
    bare = {"name": "f", "input_schema": {}, "type": "custom", "cache_control": {"type": "ephemeral"}}
    (tool,) = read(tools=[bare]).generation.prompt.tools
    assert tool["function"] == {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("choice", "forced", "max_calls", "num_tools"),
    [
        (None, None, None, 1),
        ({"type": "auto"}, None, None, 1),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, 1, 1),
        ({"type": "any"}, ANY_FUNCTION, None, 1),
        ({"type": "tool", "name": "get_weather"}, "get_weather", None, 1),
        ({"type": "none"}, None, 0, 0),
    ],
)
def test_tool_choice(choice, forced, max_calls, num_tools):
    prompt = read(tools=[TOOL], tool_choice=choice).generation.prompt
    assert (prompt.forced_call, prompt.max_calls, len(prompt.tools)) == (forced, max_calls, num_tools)


@pytest.mark.parametrize(
    ("thinking", "output_config", "expected"),
    [
        (None, None, (False, None)),
        ({"type": "disabled"}, None, (False, None)),
        (None, {"effort": "max"}, (False, None)),
        ({"type": "adaptive"}, None, (True, None)),
        ({"type": "enabled", "budget_tokens": LOW_BUDGET - 1}, None, (True, "low")),
        ({"type": "enabled", "budget_tokens": LOW_BUDGET}, None, (True, "high")),
        ({"type": "enabled", "budget_tokens": 1024}, {"effort": "max"}, (True, "max")),
        ({"type": "adaptive"}, {"effort": "medium"}, (True, "medium")),
    ],
)
def test_thinking(thinking, output_config, expected):
    prompt = read(thinking=thinking, output_config=output_config).generation.prompt
    assert (prompt.thinking, prompt.effort) == expected


def test_output_format():
    assert read(output_config={"effort": "low"}).generation.prompt.json_schema is None
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    prompt = read(output_config=wanted).generation.prompt
    assert (prompt.json_schema, prompt.schema_place) == (SCHEMA, "output_config.format.schema")


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens must be 1 to"),
        ({"max_tokens": "10"}, "max_tokens must be a whole number, not text"),
        ({"model": 3}, "model must be text"),
        ({"messages": None}, "messages must be a list with at least one"),
        ({"temperature": 3}, "temperature must be 0 to 2"),
        ({"top_k": -1}, "top_k must be 0 to"),
        ({"stop_sequences": "x"}, "stop_sequences must be a list"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\] must be a text of at least one"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences can have 16 texts at most, not 17"),
        ({"stop_sequences": ["x" * 1001]}, "stop_sequences can have 1000 letters in all"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"thinking": {"type": "much"}}, "thinking.type must be one of"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens must be a whole number"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be one of json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema must be an object"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\[0\].type: .* only custom is supported"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema must be an object"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be one of"),
        ({"tool_choice": "any"}, "tool_choice must be an object"),
    ],
)
def test_complaints_name_the_field(more, complaint):
    with pytest.raises(ChatError, match=f"^{complaint}"):
        read(**more)
