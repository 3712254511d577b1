import asyncio

import pytest

from benchmarks.front_fuzz import application
from services.front.generation import Conversation, GenerationRequest
from services.front.schema import check_format, check_schema, format_error, is_simple
from shared.errors import ErrorCode, ServiceError

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


@pytest.mark.parametrize("schema", [PERSON, True, {}, {"pattern": "(?=a)b"}, {"$ref": "#/$defs/x", "$defs": {"x": {}}}])
def test_usable_schemas_pass(schema):
    asyncio.run(check_schema(schema, "s", 60.0))


@pytest.mark.parametrize(
    "schema",
    [
        None,
        5,
        [],
        {"type": "banana"},
        {"$ref": "http://localhost:1/x"},
        {"$ref": "#/no"},
        {"$schema": "x:y"},
        {"pattern": "("},
    ],
)
def test_unusable_schemas_are_refused_by_name(schema):
    with pytest.raises(ServiceError, match=r"response_format\.schema is not a usable JSON schema: .+") as refusal:
        asyncio.run(check_schema(schema, "response_format.schema", 60.0))
    assert refusal.value.code is ErrorCode.BAD_REQUEST


def test_a_request_with_an_unusable_schema_is_refused_before_it_begins(tmp_path):
    asked = Conversation(
        ({"role": "user", "content": "x"},), json_schema={"type": "banana"}, schema_place="text.schema"
    )

    async def run():
        with application(tmp_path) as (_, answers):
            await answers.prompt(GenerationRequest(asked))

    with pytest.raises(ServiceError, match=r"text\.schema is not a usable"):
        asyncio.run(run())


def test_what_may_cost_much_is_not_simple():
    assert all(map(is_simple, (PERSON, True, {"enum": ["$ref", "pattern"]})))
    nested = {"properties": {"a": {"items": [{"patternProperties": {"^a": {}}}]}}}
    assert not any(map(is_simple, ({"pattern": "a"}, {"allOf": [{"$ref": "#"}]}, nested)))


PATTERNED = {"type": "object", "patternProperties": {"^n": {"pattern": "x"}}}


def doubling(levels):
    """A schema of so many lines that takes two to their power steps to check."""
    both = {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i - 1}"}] * 2} for i in range(1, levels)}
    return {"$defs": {"n0": {"type": "integer"}} | both, "$ref": f"#/$defs/n{levels - 1}"}


@pytest.mark.parametrize("schema", [PERSON, doubling(3), PATTERNED])
@pytest.mark.parametrize("text", ["5", '{"name": "Ada"}', "Ada", '{"name": 5, "é": "\ud800"}'])
def test_a_check_apart_says_the_same(text, schema):
    assert asyncio.run(check_format(text, schema, 60.0)) == format_error(text, schema)


async def ticks_during(check):
    """(what the check said, how often another task ran meanwhile)"""
    checking, ticks = asyncio.create_task(check), 0
    while not checking.done():
        await asyncio.sleep(0.01)
        ticks += 1
    return await checking, ticks


def test_a_schema_that_takes_for_ever_holds_nobody_up():
    error, ticks = asyncio.run(ticks_during(check_format("5", doubling(60), 1.0)))
    assert error == "cannot be checked within 1 s"
    assert ticks > 10


@pytest.mark.parametrize("seconds", [0.5, 60.0])
def test_patterns_that_grow_huge_are_refused_and_hold_nobody_up(seconds):
    """By time or by memory: each of these takes some milliseconds and megabytes."""
    huge = {"properties": {f"a{i}": {"pattern": f"^.{{1,5000}}{i}$"} for i in range(1000)}}

    async def refused():
        with pytest.raises(ServiceError, match="s is not a usable JSON schema: cannot be checked within"):
            await check_schema(huge, "s", seconds)

    assert asyncio.run(ticks_during(refused()))[1] > 10
