"""A conversation being put together out of another API's pieces, as OpenAI-style messages.

The chat format knows one assistant turn per answer and one place for instructions; APIs that send an answer in pieces
(items, blocks) write them through this class, which merges what belongs together. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BETWEEN = "\n\n"


class ConversationBuilder:
    """Add pieces in their order; `messages` is what the chat encoder reads."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def instructions(self, text: str) -> None:
        """At the beginning they are the system message; later ones are a user's words, for those get an answer."""
        if not self.messages:
            self.messages.append({"role": "system", "content": text})
        elif self.messages[-1]["role"] == "system":
            self.messages[-1]["content"] += _BETWEEN + text
        else:
            self.user(text)

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def tool_result(self, call_id: str, content: str | list[Any]) -> None:
        """`content` may be a list of parts; those that are not text are named in the prompt by their type."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def said(self, text: str) -> None:
        self._extend("content", text)

    def reasoned(self, text: str) -> None:
        self._extend("reasoning_content", text)

    def called(self, call_id: str, name: str, arguments: str) -> None:
        """`arguments` is JSON text."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _extend(self, key: str, text: str) -> None:
        turn = self._assistant()
        turn[key] = _BETWEEN.join(filter(None, (turn.get(key, ""), text)))

    def _assistant(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def function_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI-style tool definition; `parameters` is a JSON schema."""
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description:
        function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
