import pytest

from services.front.chat.messages import ChatError
from services.front.http.anthropic.messages import read_conversation
from services.front.http.fields import Fields


def read(*messages, system=None):
    return read_conversation(Fields({"messages": list(messages), "system": system}))


def user(*content):
    return {"role": "user", "content": content[0] if content and isinstance(content[0], str) else list(content)}


def assistant(*content):
    return user(*content) | {"role": "assistant"}


def text(words):
    return {"type": "text", "text": words}


USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich", "days": 2}}
CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
}


def result(content, **more):
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def test_texts_and_system():
    expected = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi\n\nthere"},
        {"role": "user", "content": "Bye"},
    ]
    messages = (user("Hello"), assistant(text("Hi"), text("there")), user(text("Bye")))
    assert read(*messages, system=[text("Be brief."), text("Be kind.") | {"cache_control": {}}]) == expected
    assert read(*messages, system="Be brief.\n\nBe kind.") == expected


def test_a_tool_round_trip():
    thinking = {"type": "thinking", "thinking": "I need it.", "signature": "whatever"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    got = read(
        user("Weather?"), assistant(thinking, hidden, text("Let me see."), USE), user(result("rain"), text("So?"))
    )
    assert got == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I need it.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (result("rain"), "rain"),
        (result(None), ""),
        (result([]), ""),
        (result([text("rain"), {"type": "image"}]), [text("rain"), {"type": "image"}]),
        (result("no such city", is_error=True), "Error: no such city"),
        (result([text("no such city")], is_error=True), [text("Error:"), text("no such city")]),
    ],
)
def test_results_of_tools(given, expected):
    assert read(user("?"), assistant(USE), user(given))[-1]["content"] == expected


def test_neighbouring_messages_of_the_assistant_are_one_turn():
    assert read(user("a"), assistant("b"), assistant("c"), user("d"))[1] == {"role": "assistant", "content": "b\n\nc"}


def test_an_empty_answer_is_a_turn():
    assert [m["role"] for m in read(user("a"), assistant(), user("b"))] == ["user", "assistant", "user"]


def test_a_last_message_of_the_assistant_is_continued():
    assert read(user("Count."), assistant("one, "))[-1] == {"role": "assistant", "content": "one, ", "wo_eos": True}


def test_later_instructions_are_read_in_their_place():
    got = read(user("a"), assistant("b"), {"role": "system", "content": "Now in French."}, user("c"))
    assert [m["role"] for m in got] == ["user", "assistant", "user", "user"]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages must be a list with at least one"),
        ([{"role": "system", "content": "x"}], "messages must be a list with at least one"),
        (["x"], r"messages\[0\] must be an object"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].role must be one of user, assistant, system"),
        ([user(), {"role": "user"}], r"messages\[1\].content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a list"),
        ([user({"type": "image"})], r"messages\[0\].content\[0\]: a block of type 'image' cannot be read here"),
        ([user(USE)], r"messages\[0\].content\[0\]: a block of type 'tool_use' cannot"),
        ([user({"text": "x"})], r"messages\[0\].content\[0\].type is missing"),
        ([user({"type": "text"})], r"messages\[0\].content\[0\].text is missing"),
        ([user("x"), assistant(USE)], "messages end with a tool_use block"),
        ([user("x"), assistant(USE | {"input": "x"})], r"messages\[1\].content\[0\].input must be an object"),
        ([user("x"), assistant(USE | {"id": 1})], r"messages\[1\].content\[0\].id must be text"),
        ([user(result({"a": 1}))], r"messages\[0\].content\[0\].content must be a list"),
    ],
)
def test_complaints_name_the_block(messages, complaint):
    with pytest.raises(ChatError, match=f"^{complaint}"):
        read(*messages)
