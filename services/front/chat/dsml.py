"""The pieces of a tool call as the model writes them (DSML), and what a reader learns of a call.

Knows nothing of streams: it gets the inside of a tag or the value of a parameter as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r'\s*name="(.*?)"\s*>', re.DOTALL)
_HEAD = re.compile(r'\s*name="(.*?)"(?:\s+string="(true|false)")?\s*>', re.DOTALL)

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls this function; its arguments follow. Whether the call is whole only `CompletedCall` says."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the text of the arguments of the call that was begun last."""

    text: str


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """A call the model made; `arguments` is the text of a JSON object.

    Its pieces together are that text, unless the model gave a parameter twice: then they hold it twice, the last one
    with the value that counts, and `arguments` once.
    """

    name: str
    arguments: str


CallEvent = CallBegun | ArgumentsPiece | CompletedCall


@dataclass(frozen=True, slots=True)
class Parameter:
    """`is_text` is what the tag said about the value; None if it said nothing."""

    name: str
    value: str
    is_text: bool | None


def read_name(inside: str, limit: int | None = None) -> str | None:
    """The function's name out of what follows `<|DSML|invoke`; None if none ends within `limit` characters.

    Text that is added behind a name does not change it.
    """
    match = _NAME.match(inside, 0, len(inside) if limit is None else limit)
    return match[1] if match else None


def read_parameter(inside: str, limit: int | None = None) -> Parameter | None:
    """A parameter out of what lies between `<|DSML|parameter` and its closing tag.

    None if it is no parameter, or none whose tag ends within `limit` characters. Text that is added behind the tag
    belongs to the value.
    """
    match = _HEAD.match(inside, 0, len(inside) if limit is None else limit)
    if match is None:
        return None
    return Parameter(match[1], inside[match.end() :], None if match[2] is None else match[2] == "true")
