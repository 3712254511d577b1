"""Whether an answer is the JSON that it was asked to be. No schema is ever fetched from anywhere.

A few references can make a schema that takes hours to check, a few patterns one that takes gigabytes, and the check
lets nothing else in its process run. So a schema with these is checked in a process of its own, `python -m
services.front.schema`, which may be ended.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema_rs

from shared.errors import ErrorCode, ServiceError

# A pattern that backtracks longer than this fails, whatever a schema says.
_PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)
# What a check apart may take.
CHECK_S = 2.0
CHECK_BYTES = 512 << 20
_COSTLY = ("$ref", "$dynamicRef", "$recursiveRef", "pattern", "patternProperties")
_UNUSABLE = (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError)


async def check_schema(schema: Any, where: str, seconds: float = CHECK_S) -> None:
    """Other tasks run meanwhile. `where` names the schema.

    Raises:
        ServiceError: bad_request, this is not a JSON schema, refers to another document, or takes too long.
    """
    if error := await _check(schema_error, [schema], schema, seconds):
        raise ServiceError(ErrorCode.BAD_REQUEST, f"{where} is not a usable JSON schema: {error}")


async def check_format(text: str, schema: Mapping[str, Any] | bool, seconds: float = CHECK_S) -> str:
    """As `format_error`; what takes longer than `seconds` cannot be checked. Other tasks run meanwhile."""
    return await _check(format_error, [text, schema], schema, seconds)


def is_simple(schema: Any) -> bool:
    """Whether it is checked in time and memory that its length bounds."""
    values = [schema]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            if any(key in value for key in _COSTLY):
                return False
            values += value.values()
        elif isinstance(value, list):
            values += value
    return True


async def _check(check: Callable[..., str], arguments: list[Any], schema: Any, seconds: float) -> str:
    if is_simple(schema):
        return check(*arguments)
    return await asyncio.to_thread(_apart, check.__name__, arguments, seconds)


def _apart(check: str, arguments: list[Any], seconds: float) -> str:
    command = [sys.executable, "-m", "services.front.schema", check]
    try:
        done = subprocess.run(command, input=json.dumps(arguments).encode(), capture_output=True, timeout=seconds)
    except RecursionError:
        return "nested too deeply"
    except subprocess.TimeoutExpired:
        return f"cannot be checked within {seconds:g} s"
    return done.stdout.decode() if done.returncode == 0 else f"cannot be checked within {CHECK_BYTES >> 20} MiB"


def schema_error(schema: Any) -> str:
    """Why this is not a JSON schema that answers can be compared with, in one line; "" if it is one."""
    try:
        _validator(schema)
    except _UNUSABLE as unusable:
        return f"{str(unusable).splitlines()[0]:.200}"
    return ""


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


def _main() -> None:
    checks: dict[str, Callable[..., str]] = {"schema_error": schema_error, "format_error": format_error}
    arguments = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_BYTES, CHECK_BYTES))
    sys.stdout.buffer.write(checks[sys.argv[1]](*arguments).encode("utf-8", "backslashreplace"))


if __name__ == "__main__":
    _main()
