import asyncio

import pytest

from services.front.chat.messages import ChatError
from services.front.schema import check_format, check_schema, format_error, has_references

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("text", "schema", "complaint"),
    [
        ('{"name": "Ada", "age": 36}', PERSON, ""),
        ('  {"name": "Ada"}\n', PERSON, ""),
        ('{"age": 36}', PERSON, 'the answer: "name" is a required property'),
        ('{"name": 5}', PERSON, "['name']: 5 is not of type"),
        ("Ada", PERSON, "not JSON"),
        ('{"name": "Ada"', PERSON, "not JSON"),
        ("[" * 100_000, PERSON, "not JSON"),
        ("[1]", {"type": "object"}, "is not of type"),
        ("5", True, ""),
        ("5", False, "False schema"),
        ("5", {"$ref": "http://localhost:1/x"}, "cannot be checked"),
        ('"' + "a" * 40 + '!"', {"pattern": "^(a+)+$(?=b)"}, "the answer"),
    ],
)
def test_answers_are_compared_with_their_schema(text, schema, complaint):
    error = format_error(text, schema)
    assert (error == "") == (complaint == "")
    assert complaint in error
    assert "\n" not in error


@pytest.mark.parametrize("schema", [PERSON, True, {}, {"pattern": "(?=a)b"}])
def test_usable_schemas_pass(schema):
    check_schema(schema, "s")


@pytest.mark.parametrize(
    "schema", [None, 5, [], {"type": "banana"}, {"$ref": "http://localhost:1/x"}, {"$ref": "#/no"}, {"$schema": "x:y"}]
)
def test_unusable_schemas_are_refused_by_name(schema):
    with pytest.raises(ChatError, match=r"response_format\.schema is not a usable JSON schema: .+"):
        check_schema(schema, "response_format.schema")


def doubling(levels):
    """A schema of so many lines that takes two to their power steps to check."""
    both = {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i - 1}"}] * 2} for i in range(1, levels)}
    return {"$defs": {"n0": {"type": "integer"}} | both, "$ref": f"#/$defs/n{levels - 1}"}


@pytest.mark.parametrize("schema", [PERSON, doubling(3), True])
@pytest.mark.parametrize("text", ["5", '{"name": "Ada"}', "Ada", '{"name": 5, "é": "\ud800"}'])
def test_a_check_apart_says_the_same(text, schema):
    assert has_references(schema) == (isinstance(schema, dict) and "$ref" in schema)
    assert asyncio.run(check_format(text, schema, 60.0)) == format_error(text, schema)


def test_a_schema_that_takes_for_ever_holds_nobody_up():
    async def run():
        check, ticks = asyncio.create_task(check_format("5", doubling(60), 1.0)), 0
        while not check.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return await check, ticks

    error, ticks = asyncio.run(run())
    assert error == "cannot be checked: the schema takes more than 1 s"
    assert ticks > 10
