"""The input of /v1/responses (a text, or items) as a conversation for the chat encoder.

Format: the request body of POST /v1/responses, developers.openai.com/api/reference/resources/responses. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.front.chat.messages import ChatError
from services.front.http.conversation import ConversationBuilder
from services.front.http.fields import Fields

_TEXT_PARTS = ("input_text", "output_text", "text")


def read_conversation(body: Fields) -> list[dict[str, Any]]:
    """`instructions` and `input` as OpenAI-style chat messages.

    Raises:
        ChatError: an item has the wrong shape, or is of a kind that this model cannot read.
    """
    conversation = ConversationBuilder()
    if text := body.text("instructions", ""):
        conversation.instructions(text)
    if isinstance(text := body.raw("input"), str):
        conversation.user(text)
        return conversation.messages
    for item in body.tables("input"):
        kind = item.text("type", "message")
        reader = _READERS.get(kind)
        if reader is None:
            raise ChatError(
                f"{item.where}: an item of type {kind[:40]!r} cannot be read (known: {', '.join(_READERS)})"
            )
        reader(conversation, item)
    messages = conversation.messages
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ChatError("input must end with what the model should answer: a user's message or a function_call_output")
    return messages


def _read_message(conversation: ConversationBuilder, item: Fields) -> None:
    role = item.choice("role", ("user", "assistant", "system", "developer"))
    text = _text_of(item, "content")
    if role == "user":
        conversation.user(text)
    elif role == "assistant":
        conversation.said(text)
    else:
        conversation.instructions(text)


def _read_reasoning(conversation: ConversationBuilder, item: Fields) -> None:
    """Its text, or else its summary; reasoning that only its maker can decrypt is nothing to this model."""
    parts = list(item.tables("content")) or list(item.tables("summary"))
    conversation.reasoned("\n\n".join(part.text("text") for part in parts))


def _read_call(conversation: ConversationBuilder, item: Fields) -> None:
    conversation.called(item.text("call_id"), item.text("name"), item.text("arguments"))


def _read_call_output(conversation: ConversationBuilder, item: Fields) -> None:
    output = item.raw("output")
    if not isinstance(output, str):
        output = [_as_chat_part(part) for part in item.items("output")]
    conversation.tool_result(item.text("call_id"), output)


def _as_chat_part(part: Any) -> Any:
    """The chat encoder calls every kind of text "text"."""
    is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
    return {**part, "type": "text"} if is_text else part


_READERS = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
}


def _text_of(source: Fields, key: str) -> str:
    """A text, or a list of parts that are text."""
    if isinstance(source.raw(key), str):
        return source.text(key)
    if not source.has(key):
        raise ChatError(f"{source.place(key)} is missing; it must be text or a list of parts")
    return "\n\n".join(map(_part_text, source.tables(key)))


def _part_text(part: Fields) -> str:
    kind = part.choice("type", (*_TEXT_PARTS, "refusal"))
    return part.text("refusal" if kind == "refusal" else "text")
