"""Anthropic's messages (content blocks) as a conversation for the chat encoder.

Format: the request body of POST /v1/messages, platform.claude.com/docs/en/api/messages. Pure.
"""

from __future__ import annotations

import json
from typing import Any

from services.front.chat.messages import ChatError
from services.front.http.conversation import ConversationBuilder
from services.front.http.fields import Fields


def read_conversation(body: Fields) -> list[dict[str, Any]]:
    """`system` and `messages` as OpenAI-style messages. A last message of the assistant stays open: the answer
    continues it.

    Raises:
        ChatError: a message or block has the wrong shape, or is of a kind that this model cannot read.
    """
    conversation = ConversationBuilder()
    if text := _text_of(body, "system"):
        conversation.instructions(text)
    for message in body.tables("messages"):
        _read_message(conversation, message)
    read = conversation.messages
    if not read or read[-1]["role"] == "system":
        raise ChatError("messages must be a list with at least one message of user or assistant")
    last = read[-1]
    if last["role"] == "assistant":
        if "tool_calls" in last:
            raise ChatError("messages end with a tool_use block; its tool_result must follow")
        last["wo_eos"] = True
    return read


def _read_message(conversation: ConversationBuilder, message: Fields) -> None:
    role = message.choice("role", ("user", "assistant", "system"))
    if role == "system":
        conversation.instructions(_text_of(message, "content"))
        return
    if role == "assistant":
        conversation.said("")  # an empty answer is a turn, too
    if isinstance(text := message.raw("content"), str):
        if role == "user":
            conversation.user(text)
        else:
            conversation.said(text)
        return
    if not message.has("content"):
        raise ChatError(f"{message.place('content')} is missing; it must be text or a list of blocks")
    for block in message.tables("content"):
        kind = block.text("type")
        reader = _READERS[role].get(kind)
        if reader is None:
            known = ", ".join(_READERS[role])
            raise ChatError(f"{block.where}: a block of type {kind[:40]!r} cannot be read here (known: {known})")
        reader(conversation, block)


def _read_user_text(conversation: ConversationBuilder, block: Fields) -> None:
    conversation.user(block.text("text"))


def _read_tool_result(conversation: ConversationBuilder, block: Fields) -> None:
    content = block.raw("content")
    if not isinstance(content, str):
        content = block.items("content") or ""
    if block.flag("is_error", False):
        # The model's format has no mark for a failed call, but the model should know.
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]
    conversation.tool_result(block.text("tool_use_id"), content)


def _read_assistant_text(conversation: ConversationBuilder, block: Fields) -> None:
    conversation.said(block.text("text"))


def _read_thinking(conversation: ConversationBuilder, block: Fields) -> None:
    conversation.reasoned(block.text("thinking"))


def _skip(conversation: ConversationBuilder, block: Fields) -> None:
    """Reasoning that only its maker can decrypt."""


def _read_tool_use(conversation: ConversationBuilder, block: Fields) -> None:
    arguments = Fields(block.raw("input"), block.place("input"))
    conversation.called(block.text("id"), block.text("name"), json.dumps(arguments.values, ensure_ascii=False))


_READERS = {
    "user": {"text": _read_user_text, "tool_result": _read_tool_result},
    "assistant": {
        "text": _read_assistant_text,
        "thinking": _read_thinking,
        "redacted_thinking": _skip,
        "tool_use": _read_tool_use,
    },
}


def _text_of(source: Fields, key: str) -> str:
    """A text, or a list of text blocks."""
    if isinstance(source.raw(key), str):
        return source.text(key)
    return "\n\n".join(block.text("text") for block in source.tables(key))
