"""An answer in Anthropic's words: the events of a stream, and the whole message.

Format: platform.claude.com/docs/en/build-with-claude/streaming. A message is a list of content blocks, written one
after the other; each is opened, grows and is closed. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from services.front.generation import (
    Event,
    Finished,
    Queued,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    Usage,
)
from services.front.http.anthropic.errors import error_body
from services.front.http.errors import problem_of
from services.front.http.parts import format_body
from shared.errors import ServiceError

PING = {"type": "ping"}

# Clients keep thinking blocks only if they are signed, and send them back; nobody here checks the signature.
SIGNATURE = "unsigned"

# An answer that someone cancelled is like a pause: sent back, it can be continued.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}


@dataclass(slots=True)
class _Block:
    """The block being written: what it was opened as, and the pieces that were added.

    A call `is_cut` until its end is known.
    """

    opening: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def complete(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        match self.opening["type"]:
            case "text":
                return self.opening | {"text": text}
            case "thinking":
                return self.opening | {"thinking": text, "signature": SIGNATURE}
        return self.opening | {"input": json.loads(text)}


class MessageEncoder:
    """Give it every event of one answer; `whole` is the message after the last."""

    def __init__(self, message_id: str, model: str) -> None:
        self.whole: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage()),
        }
        self._is_begun = False
        self._block: _Block | None = None

    def encode(self, event: Event) -> list[dict[str, Any]]:
        """The stream's events for this one; the name of each is its `type`."""
        match event:
            case Queued(place):
                return [PING] if place else []
            case Started(prompt_tokens, cached_tokens):
                return self._begin(Usage(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens))
            case TextDelta(text):
                return self._write({"type": "text", "text": ""}, "text_delta", "text", text)
            case ReasoningDelta(text):
                opening = {"type": "thinking", "thinking": "", "signature": ""}
                return self._write(opening, "thinking_delta", "thinking", text)
            case ToolCallDelta():
                return self._call_delta(event)
            case ToolCallDone(_, arguments):
                return self._end_call(arguments)
            case Finished():
                return [*self._begin(event.usage), *self._close(), *self._finish(event)]

    def fail(self, error: ServiceError) -> list[dict[str, Any]]:
        return [error_body(problem_of(error))]

    def _begin(self, usage: Usage) -> list[dict[str, Any]]:
        """Once: an answer that was cancelled while it waited begins at its end."""
        if self._is_begun:
            return []
        self._is_begun = True
        self.whole["usage"] = _usage(usage)
        return [{"type": "message_start", "message": self.whole | {"content": []}}]

    def _write(self, opening: dict[str, Any], delta: str, key: str, text: str) -> list[dict[str, Any]]:
        events = []
        if self._block is None or self._block.opening["type"] != opening["type"]:
            events = self._open(opening)
        return [*events, self._grow(delta, key, text)]

    def _call_delta(self, event: ToolCallDelta) -> list[dict[str, Any]]:
        events = []
        if event.id:
            events = self._open({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        if event.arguments:
            events.append(self._grow("input_json_delta", "partial_json", event.arguments))
        return events

    def _end_call(self, arguments: str) -> list[dict[str, Any]]:
        assert self._block is not None
        self._block.pieces, self._block.is_cut = [arguments], False
        return self._close()

    def _open(self, opening: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._block = _Block(opening, is_cut=opening["type"] == "tool_use")
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": opening}]

    def _grow(self, delta: str, key: str, text: str) -> dict[str, Any]:
        assert self._block is not None
        self._block.pieces.append(text)
        return self._delta({"type": delta, key: text})

    def _close(self) -> list[dict[str, Any]]:
        """A stream's blocks are all closed; a call that is cut off, always the last, is not part of the message."""
        if self._block is None:
            return []
        events = [{"type": "content_block_stop", "index": self._index}]
        if self._block.opening["type"] == "thinking":
            events.insert(0, self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        if not self._block.is_cut:
            self.whole["content"].append(self._block.complete)
        self._block = None
        return events

    @property
    def _index(self) -> int:
        """Of the block that is open."""
        return len(self.whole["content"])

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _finish(self, event: Finished) -> list[dict[str, Any]]:
        reason = "stop_sequence" if event.stop_text is not None else _STOP_REASONS[event.reason]
        ending = {"stop_reason": reason, "stop_sequence": event.stop_text} | format_body(event)
        self.whole |= ending | {"usage": _usage(event.usage)}
        return [
            {"type": "message_delta", "delta": ending, "usage": self.whole["usage"]},
            {"type": "message_stop"},
        ]


def _usage(usage: Usage) -> dict[str, Any]:
    """`input_tokens` counts what was read anew: the prompt is this and what came from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
