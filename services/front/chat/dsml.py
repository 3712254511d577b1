"""The pieces of a tool call as the model writes them (DSML), and arguments put together as JSON.

Knows nothing of streams: it gets the inside of a tag or the value of a parameter as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

_NAME = re.compile(r'\s*name="(.*?)"\s*>', re.DOTALL)
_PARAMETER = re.compile(r'\s*name="(.*?)"(?:\s+string="(true|false)")?\s*>(.*)', re.DOTALL)

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """A call the model made; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """`is_text` is what the tag said about the value; None if it said nothing."""

    name: str
    value: str
    is_text: bool | None


def read_name(inside: str) -> str | None:
    """The function's name out of what follows `<|DSML|invoke`; None if there is none."""
    match = _NAME.match(inside)
    return match[1] if match else None


def read_parameter(inside: str) -> Parameter | None:
    """A parameter out of what lies between `<|DSML|parameter` and its closing tag; None if it is no parameter."""
    match = _PARAMETER.match(inside)
    if match is None:
        return None
    return Parameter(match[1], match[3], None if match[2] is None else match[2] == "true")


def arguments_json(parameters: Mapping[str, Parameter], schema: Schema | None) -> str:
    """Arguments as the text of a JSON object, whatever the model wrote.

    A value that claims to be JSON and is not becomes text; one that claims nothing follows the schema's type, else
    is JSON if it parses. A single parameter "arguments" that holds an object is that object, unless the function
    really has such a parameter.
    """
    properties = schema.get("properties") if schema is not None else None
    known = properties if isinstance(properties, Mapping) else {}
    if len(parameters) == 1 and "arguments" in parameters and "arguments" not in known:
        value = parameters["arguments"].value
        if value.lstrip().startswith("{") and is_json(value):
            return value.strip()
    return joined({name: _json_value(p, known.get(name)) for name, p in parameters.items()})


def joined(values: Mapping[str, str]) -> str:
    """A JSON object out of names and JSON texts; the texts are copied unchanged."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in values.items()) + "}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_value(parameter: Parameter, declared: Any) -> str:
    is_text = parameter.is_text
    if is_text is None and isinstance(declared, Mapping) and declared.get("type") == "string":
        is_text = True
    return quoted(parameter.value) if is_text or not is_json(parameter.value) else parameter.value


def is_json(text: str) -> bool:
    """Whether this is JSON as the standard has it (RFC 8259): no NaN, no Infinity."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
