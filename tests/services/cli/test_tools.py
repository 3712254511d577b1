import json

import pytest

from services.cli.tools import call_text, read_tools
from shared.errors import ErrorCode, ServiceError

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_file_of_tools(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL]))
    assert read_tools(path) == [TOOL]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read it"),
        (b"[", "not JSON"),
        (b"[\xff]", "not JSON"),
        (rb'["\ud800"]', "not JSON: .* surrogates not allowed"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "must be a JSON list"),
        (b"[3]", r"entry 0 has no function\.name"),
        (json.dumps([TOOL, {"function": {"name": 1}}]).encode(), r"entry 1 has no function\.name"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, content, problem):
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServiceError, match=rf"tools\.json: {problem}") as caught:
        read_tools(path)
    assert caught.value.code == ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"city": "Århus", "days": 3, "when": [1]}', 'f(city="Århus", days=3, when=[1])'),
        ("{}", "f()"),
        ("[1]", "f([1])"),
        ("{half", "f({half)"),
    ],
)
def test_calls_read_as_code(arguments, text):
    assert call_text({"function": {"name": "f", "arguments": arguments}}) == text
