"""Whether an answer is the JSON that it was asked to be. No schema is ever fetched from anywhere.

A few references can make a schema that takes hours to check, and the check lets nothing else in its process run. So a
schema with references is checked in a process of its own, `python -m services.front.schema`, which may be ended.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jsonschema_rs

from services.front.chat.messages import ChatError

# A pattern that backtracks longer than this fails, whatever a schema says.
_PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)
# What an answer may take that is checked apart.
CHECK_S = 2.0
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_UNUSABLE = (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError)


def check_schema(schema: Any, where: str) -> None:
    """Raises ChatError if this is not a JSON schema, or one that refers to another document."""
    try:
        _validator(schema)
    except _UNUSABLE as error:
        raise ChatError(f"{where} is not a usable JSON schema: {str(error).splitlines()[0]:.200}") from None


async def check_format(text: str, schema: Mapping[str, Any] | bool, seconds: float = CHECK_S) -> str:
    """As `format_error`; what takes longer than `seconds` cannot be checked. Other tasks run meanwhile."""
    if not has_references(schema):
        return format_error(text, schema)
    return await asyncio.to_thread(_format_error_apart, text, schema, seconds)


def has_references(schema: Any) -> bool:
    values = [schema]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            if any(key in value for key in _REFERENCES):
                return True
            values += value.values()
        elif isinstance(value, list):
            values += value
    return False


def _format_error_apart(text: str, schema: Any, seconds: float) -> str:
    command = [sys.executable, "-m", "services.front.schema"]
    try:
        done = subprocess.run(command, input=json.dumps([text, schema]).encode(), capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"cannot be checked: the schema takes more than {seconds:g} s"
    return done.stdout.decode() if done.returncode == 0 else f"cannot be checked: exit status {done.returncode}"


def format_error(text: str, schema: Mapping[str, Any] | bool) -> str:
    """What is wrong with this text under a schema that `check_schema` has passed, in one line; "" if nothing is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    try:
        wrong = next(_validator(schema).iter_errors(value), None)
    except _UNUSABLE as unusable:
        return f"cannot be checked: {str(unusable).splitlines()[0]:.200}"
    if wrong is None:
        return ""
    place = "".join(f"[{step!r}]" for step in wrong.instance_path)
    return f"{place or 'the answer'}: {wrong.message:.200}"


def _validator(schema: Any) -> Any:
    return jsonschema_rs.validator_for(schema, retriever=_refuse, pattern_options=_PATTERNS)


def _refuse(uri: str) -> Any:
    raise ValueError(f"it refers to {uri}, and nothing is fetched")


if __name__ == "__main__":
    sys.stdout.buffer.write(format_error(*json.load(sys.stdin)).encode("utf-8", "backslashreplace"))
