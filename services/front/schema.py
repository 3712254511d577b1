"""Whether an answer is the JSON that it was asked to be. Pure: no schema is ever fetched from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema_rs

from services.front.chat.messages import ChatError

# A pattern that backtracks longer than this fails, whatever a schema says.
_PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)
_UNUSABLE = (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError)


def check_schema(schema: Any, where: str) -> None:
    """Raises ChatError if this is not a JSON schema, or one that refers to another document."""
    try:
        _validator(schema)
    except _UNUSABLE as error:
        raise ChatError(f"{where} is not a usable JSON schema: {str(error).splitlines()[0]:.200}") from None


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
