"""The arguments of a call, put together as the text of a JSON object while its parameters come in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn

from services.front.chat.dsml import Parameter, Schema

_WRAPPER = "arguments"


class ArgumentsWriter:
    """Give it the parameters in order, then `end` it; what it returns, joined, is the text.

    A text may be written while it comes: `open_text`, `text` for each piece, `close_text`. A value that claims to be
    JSON and is not becomes text; one that claims nothing follows the schema's type, else is JSON if it parses. A single
    parameter "arguments" that holds an object is that object, unless the function really has such a parameter; so
    where it comes first, it waits until the next parameter or the end.
    """

    def __init__(self, schema: Schema | None) -> None:
        properties = schema.get("properties") if schema is not None else None
        self._known = properties if isinstance(properties, Mapping) else {}
        self._is_empty = True
        self._waiting: Parameter | None = None

    def is_text(self, parameter: Parameter) -> bool:
        """Whether the value is text whatever it says, so that it may be written before it is complete."""
        return self._is_declared_text(parameter) and not self._may_be_all(parameter)

    def open_text(self, name: str) -> str:
        return self._release() + self._key(name) + '"'

    def text(self, piece: str) -> str:
        return quoted(piece)[1:-1]

    def close_text(self) -> str:
        return '"'

    def parameter(self, parameter: Parameter) -> str:
        if self._may_be_all(parameter):
            self._waiting = parameter
            return ""
        return self._release() + self._member(parameter)

    def end(self) -> str:
        if self._waiting is not None:
            value = self._waiting.value
            if value.lstrip().startswith("{") and is_json(value):
                return value.strip()
        return self._release() + ("{}" if self._is_empty else "}")

    def _may_be_all(self, parameter: Parameter) -> bool:
        return self._is_empty and parameter.name == _WRAPPER and _WRAPPER not in self._known

    def _release(self) -> str:
        waiting, self._waiting = self._waiting, None
        return "" if waiting is None else self._member(waiting)

    def _member(self, parameter: Parameter) -> str:
        is_text = self._is_declared_text(parameter) or not is_json(parameter.value)
        return self._key(parameter.name) + (quoted(parameter.value) if is_text else parameter.value)

    def _is_declared_text(self, parameter: Parameter) -> bool:
        if parameter.is_text is not None:
            return parameter.is_text
        declared = self._known.get(parameter.name)
        return isinstance(declared, Mapping) and declared.get("type") == "string"

    def _key(self, name: str) -> str:
        before, self._is_empty = "{" if self._is_empty else ", ", False
        return f"{before}{quoted(name)}: "


def arguments_json(parameters: Mapping[str, Parameter], schema: Schema | None) -> str:
    """All arguments at once, whatever the model wrote."""
    writer = ArgumentsWriter(schema)
    return "".join(map(writer.parameter, parameters.values())) + writer.end()


def joined(values: Mapping[str, str]) -> str:
    """A JSON object out of names and JSON texts; the texts are copied unchanged."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in values.items()) + "}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Whether this is JSON as the standard has it (RFC 8259): no NaN, no Infinity."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
