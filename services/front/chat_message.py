"""The `Chat` message as a `GenerationRequest`, and events as `TextChunk` messages. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.front.chat.messages import ChatError
from services.front.generation import (
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    ReasoningDelta,
    Sampling,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    Usage,
)
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import Chat, TextChunk


@dataclass(frozen=True, slots=True)
class _Options:
    """What `Chat.options_json` may say."""

    thinking: bool = False
    drop_thinking: bool = True
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


_OPTION_KINDS: dict[str, tuple[type, ...]] = {
    "thinking": (bool,),
    "drop_thinking": (bool,),
    "reasoning_effort": (str, type(None)),
    "tools": (list, type(None)),
    "response_format": (dict, type(None)),
}


def request_of(chat: Chat) -> GenerationRequest:
    """Raises ServiceError: bad_request, naming the field."""
    try:
        messages, options = _read_messages(chat.messages_json), _read_options(chat.options_json)
    except ChatError as error:
        raise ServiceError(ErrorCode.BAD_REQUEST, str(error)) from None
    except RecursionError:
        raise ServiceError(ErrorCode.BAD_REQUEST, "the request is nested too deeply") from None
    prompt = Conversation(
        messages=tuple(messages),
        thinking=options.thinking,
        effort=options.reasoning_effort,
        drop_thinking=options.drop_thinking,
        tools=tuple(options.tools or ()),
        json_schema=options.response_format,
        schema_place="options.response_format",
    )
    sampling = Sampling(chat.max_tokens, chat.temperature, chat.top_p, chat.top_k, chat.min_p, chat.seed)
    return GenerationRequest(prompt, sampling)


def _read_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ChatError(f"{name} is not JSON: {error}") from None


def _read_messages(text: str) -> list[Any]:
    messages = _read_json(text, "messages")
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a list with at least one message")
    return messages


def _read_options(text: str) -> _Options:
    table = _read_json(text, "options")
    if not isinstance(table, dict):
        raise ChatError("options must be an object")
    for key, value in table.items():
        if key not in _OPTION_KINDS:
            raise ChatError(f"options.{key} is unknown (known: {', '.join(_OPTION_KINDS)})")
        if not isinstance(value, _OPTION_KINDS[key]):
            raise ChatError(f"options.{key} cannot be {value!r:.80}")
    return _Options(**table)


class ChunkWriter:
    """The chunks of one answer; its calls come with the last, those that are complete."""

    def __init__(self) -> None:
        self._call: dict[str, Any] = {}
        self._calls: list[dict[str, Any]] = []

    def chunk(self, event: Event, usage: Usage) -> TextChunk | None:
        """The chunk for an event, if it needs one; `usage` is the request's so far."""
        match event:
            case TextDelta(text):
                return _chunk(usage, text=text)
            case ReasoningDelta(text):
                return _chunk(usage, reasoning=text)
            case ToolCallDelta(_, _, call_id, name) if call_id:
                self._call = {"id": call_id, "type": "function", "function": {"name": name}}
            case ToolCallDone(_, arguments):
                self._call["function"]["arguments"] = arguments
                self._calls.append(self._call)
            case Finished(reason, usage):
                calls = json.dumps(self._calls, ensure_ascii=False) if self._calls else ""
                return _chunk(usage, tool_calls_json=calls, finish_reason=reason)
        return None


def _chunk(
    usage: Usage, text: str = "", reasoning: str = "", tool_calls_json: str = "", finish_reason: str = ""
) -> TextChunk:
    return TextChunk(
        text=text,
        reasoning=reasoning,
        tool_calls_json=tool_calls_json,
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        ttft_s=usage.ttft_s,
        elapsed_s=usage.elapsed_s,
    )
