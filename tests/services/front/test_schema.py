import pytest

from services.front.chat.messages import ChatError
from services.front.schema import check_schema, format_error

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
