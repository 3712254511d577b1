"""An answer in the words of /v1/responses: the events of a stream, and the whole response.

Format: developers.openai.com/api/reference/resources/responses (streaming events). A response is a list of items
(reasoning, message, function_call), written one after the other; reasoning and messages hold one part of text. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
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
from services.front.http.parts import format_body, token_body
from shared.errors import ErrorCode, ServiceError


@dataclass(slots=True)
class _Item:
    """The item being written: what it was opened as, and the pieces that were added.

    A call `is_cut` until its end is known.
    """

    opening: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def part(self) -> dict[str, Any] | None:
        """The part that holds the text; a function call has none."""
        match self.opening["type"]:
            case "message":
                return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}
            case "reasoning":
                return {"type": "reasoning_text", "text": self.text}
        return None

    @property
    def endings(self) -> list[tuple[str, dict[str, Any]]]:
        """What a stream says of the whole text: kinds of events and their fields."""
        place: dict[str, Any] = {"content_index": 0}
        text, part = {"text": self.text}, {"part": self.part}
        match self.opening["type"]:
            case "message":
                done = ("output_text.done", place | text | {"logprobs": self.logprobs})
            case "reasoning":
                done = ("reasoning_text.done", place | text)
            case _:
                return [("function_call_arguments.done", {"arguments": self.text, "name": self.opening["name"]})]
        return [done, ("content_part.done", place | part)]

    def complete(self, status: str) -> dict[str, Any]:
        content = {"arguments": self.text} if self.part is None else {"content": [self.part]}
        return self.opening | content | {"status": status}


class ResponseEncoder:
    """Give it every event of one answer, or its error; `whole` is the response after the last.

    `head` is what the response says about itself and repeats of the request; `new_id` makes an id out of its prefix.
    """

    def __init__(self, head: dict[str, Any], new_id: Callable[[str], str]) -> None:
        self.whole: dict[str, Any] = {
            "object": "response",
            "status": "queued",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
        } | head
        self._new_id = new_id
        self._num_events = 0
        self._item: _Item | None = None

    def encode(self, event: Event) -> list[dict[str, Any]]:
        """The stream's events for this one; the name of each is its `type`."""
        match event:
            case Queued():
                return [*self._begin(), self._response_event("response.queued")]
            case Started():
                self.whole["status"] = "in_progress"
                return [*self._begin(), self._response_event("response.in_progress")]
            case TextDelta():
                return self._text_delta(event)
            case ReasoningDelta(text):
                return [*self._continue("reasoning"), self._grow("reasoning_text.delta", text, content_index=0)]
            case ToolCallDelta():
                return self._call_delta(event)
            case ToolCallDone(_, arguments):
                return self._end_call(arguments)
            case Finished("abort"):
                return self.fail(ServiceError(ErrorCode.CANCELLED, "the request was cancelled"))
            case Finished():
                return self._finish(event)

    def fail(self, error: ServiceError) -> list[dict[str, Any]]:
        """The end of an answer that cannot be completed."""
        events = [*self._begin(), *self._close("incomplete")]
        self.whole |= {"status": "failed", "error": {"code": "server_error", "message": error.detail}}
        return [*events, self._response_event("response.failed")]

    def _begin(self) -> list[dict[str, Any]]:
        return [] if self._num_events else [self._response_event("response.created")]

    def _text_delta(self, event: TextDelta) -> list[dict[str, Any]]:
        events = self._continue("message")
        logprobs = list(map(token_body, event.logprobs))
        events.append(self._grow("output_text.delta", event.text, content_index=0, logprobs=logprobs))
        assert self._item is not None
        self._item.logprobs += logprobs
        return events

    def _continue(self, kind: str) -> list[dict[str, Any]]:
        """Open an item of this kind if none is open."""
        return self._open_text(kind) if self._item is None or self._item.opening["type"] != kind else []

    def _open_text(self, kind: str) -> list[dict[str, Any]]:
        if kind == "message":
            events = self._open({"id": self._new_id("msg"), "type": "message", "role": "assistant", "content": []})
        else:
            events = self._open({"id": self._new_id("rs"), "type": "reasoning", "summary": [], "content": []})
        assert self._item is not None
        return [*events, self._item_event("content_part.added", content_index=0, part=self._item.part)]

    def _call_delta(self, event: ToolCallDelta) -> list[dict[str, Any]]:
        events = []
        if event.id:
            opening = {"id": self._new_id("fc"), "type": "function_call", "call_id": event.id, "name": event.name}
            events = self._open(opening | {"arguments": ""})
        if event.arguments:
            events.append(self._grow("function_call_arguments.delta", event.arguments))
        return events

    def _end_call(self, arguments: str) -> list[dict[str, Any]]:
        assert self._item is not None
        self._item.pieces, self._item.is_cut = [arguments], False
        return self._close("completed")

    def _open(self, opening: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close("completed")
        self._item = _Item(opening, is_cut=opening["type"] == "function_call")
        item = opening | {"status": "in_progress"}
        return [*events, self._event("response.output_item.added", output_index=self._index, item=item)]

    def _grow(self, kind: str, text: str, **place: Any) -> dict[str, Any]:
        assert self._item is not None
        self._item.pieces.append(text)
        return self._item_event(kind, delta=text, **place)

    def _close(self, status: str) -> list[dict[str, Any]]:
        """A stream's items are all closed; a call that is cut off, always the last, is not part of the response."""
        if self._item is None:
            return []
        item = self._item.complete("incomplete" if self._item.is_cut else status)
        events = [self._item_event(kind, **fields) for kind, fields in self._item.endings]
        events.append(self._event("response.output_item.done", output_index=self._index, item=item))
        if not self._item.is_cut:
            self.whole["output"].append(item)
        self._item = None
        return events

    def _finish(self, event: Finished) -> list[dict[str, Any]]:
        status = "incomplete" if event.reason == "length" else "completed"
        events = self._close(status)
        self.whole |= {"status": status, "usage": _usage(event.usage)} | format_body(event)
        if status == "incomplete":
            self.whole["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._response_event(f"response.{status}")]

    @property
    def _index(self) -> int:
        """Of the item that is open."""
        return len(self.whole["output"])

    def _item_event(self, kind: str, **values: Any) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item.opening["id"], "output_index": self._index}
        return self._event(f"response.{kind}", **place, **values)

    def _response_event(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self.whole | {"output": list(self.whole["output"])})

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **values}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
