import pytest

from services.front.chat.messages import ChatError
from services.front.http.fields import Fields
from services.front.http.responses.items import read_conversation

CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "get_weather",
    "arguments": '{"city": "Rome"}',
}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}


def read(*items, instructions=None):
    return read_conversation(Fields({"input": list(items), "instructions": instructions}))


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def test_a_text():
    body = Fields({"input": "Hello", "instructions": "Be brief."})
    assert read_conversation(body) == [message("system", "Be brief."), message("user", "Hello")]


def test_messages_with_and_without_type_and_parts():
    part = {"type": "output_text", "text": "Hi", "annotations": []}
    got = read(
        message("developer", [{"type": "input_text", "text": "Be kind."}], type="message"),
        message("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        message(
            "assistant", [part, {"type": "refusal", "refusal": "No."}], type="message", id="msg_1", status="completed"
        ),
        message("user", "c"),
        instructions="Be brief.",
    )
    assert got == [
        message("system", "Be brief.\n\nBe kind."),
        message("user", "a\n\nb"),
        message("assistant", "Hi\n\nNo."),
        message("user", "c"),
    ]


def test_the_items_of_one_answer_are_one_turn():
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    got = read(
        message("user", "?"), reasoning, message("assistant", "Let me see."), CALL, CALL | {"call_id": "2"}, OUTPUT
    )
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ("call_1", "2")]
    assert got[1:] == [
        message("assistant", "Let me see.", reasoning_content="Hm.", tool_calls=calls),
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"summary": [{"type": "summary_text", "text": "In short."}]}, "In short."),
        ({"summary": [], "encrypted_content": "abc"}, ""),
        ({"summary": [{"text": "In short."}], "content": [{"text": "At length."}]}, "At length."),
    ],
)
def test_reasoning(more, expected):
    assert (
        read(message("user", "?"), {"type": "reasoning", **more}, message("user", "!"))[1]["reasoning_content"]
        == expected
    )


def test_parts_of_an_output():
    parts = [{"type": "input_text", "text": "rain"}, {"type": "input_image", "image_url": "x"}]
    got = read(message("user", "?"), CALL, OUTPUT | {"output": parts})
    assert got[-1]["content"] == [{"type": "text", "text": "rain"}, parts[1]]


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([], "input must end with what the model should answer"),
        ([message("assistant", "x")], "input must end with what the model should answer"),
        ([message("user", "x"), CALL], "input must end with what the model should answer"),
        (["x"], r"input\[0\] must be an object"),
        ([message("tool", "x")], r"input\[0\].role must be one of"),
        ([{"role": "user"}], r"input\[0\].content is missing"),
        ([message("user", [{"type": "input_image"}])], r"input\[0\].content\[0\].type must be one of input_text"),
        ([{"type": "item_reference", "id": "x"}], r"input\[0\]: an item of type 'item_reference' cannot be read"),
        ([CALL | {"arguments": {}}], r"input\[0\].arguments must be text"),
        ([{"type": "function_call_output", "output": "x"}], r"input\[0\].call_id is missing"),
        ([OUTPUT | {"output": 3}], r"input\[0\].output must be a list"),
        ([{"type": 3}], r"input\[0\].type must be text"),
    ],
)
def test_complaints_name_the_item(items, complaint):
    with pytest.raises(ChatError, match=f"^{complaint}"):
        read(*items)
