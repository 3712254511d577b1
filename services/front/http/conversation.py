"""A conversation being put together out of another API's pieces, as OpenAI-style messages.

The chat format knows one assistant turn per answer and one place for instructions; APIs that send an answer in pieces
(items, blocks) write them through this class, which merges what belongs together. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConversationBuilder:
    """Add pieces in their order, then take the `messages` that the chat encoder reads."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [_joined(message) for message in self._messages]

    def instructions(self, text: str) -> None:
        """At the beginning they are the system message; later ones are a user's words, for those get an answer."""
        if all(message["role"] == "system" for message in self._messages[-1:]):
            self._last("system")["content"].append(text)
        else:
            self.user(text)

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def tool_result(self, call_id: str, content: str | list[Any]) -> None:
        """`content` may be a list of parts; those that are not text are named in the prompt by their type."""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def said(self, text: str) -> None:
        self._last("assistant")["content"].append(text)

    def reasoned(self, text: str) -> None:
        self._last("assistant").setdefault("reasoning_content", []).append(text)

    def called(self, call_id: str, name: str, arguments: str) -> None:
        """`arguments` is JSON text."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._last("assistant").setdefault("tool_calls", []).append(call)

    def _last(self, role: str) -> dict[str, Any]:
        """The last message if it is of this role, else a new one; its texts are lists of pieces as long as it grows."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


_GROWING = {"system": ("content",), "assistant": ("content", "reasoning_content")}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    keys = (key for key in _GROWING.get(message["role"], ()) if key in message)
    return message | {key: "\n\n".join(filter(None, message[key])) for key in keys}


def function_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI-style tool definition; `parameters` is a JSON schema."""
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description:
        function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
