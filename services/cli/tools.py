"""Tools that the model may call: the file that offers them, and its calls as a person reads them.

Nothing here runs anything. A person gives the results, so a model can do no more than ask.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ErrorCode, ServiceError

DECLINED = "The user did not run this call."


def read_tools(path: Path) -> list[dict[str, Any]]:
    """A JSON list of OpenAI-style tools, `{"type": "function", "function": {"name": ..., "parameters": ...}}` each.

    Raises:
        ServiceError: bad_request, naming the file and the entry.
    """
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(tools, ensure_ascii=False).encode()  # half of a surrogate pair is a string that cannot be sent
    except OSError as error:
        raise _bad(path, f"cannot read it ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"not JSON: {error}") from None
    if not isinstance(tools, list):
        raise _bad(path, "must be a JSON list of tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(path, f"entry {i} has no function.name")
    return tools


def _bad(path: Path, text: str) -> ServiceError:
    return ServiceError(ErrorCode.BAD_REQUEST, f"{path}: {text}")


def call_text(call: dict[str, Any]) -> str:
    """A call as one line of code, such as `weather(city="Oslo", days=3)`."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:  # what the model wrote is no JSON: shown as it is
        arguments = None
    if not isinstance(arguments, dict):
        return f"{function['name']}({function['arguments']})"
    pairs = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{function['name']}({', '.join(pairs)})"
