"""An answer in the words of /v1/chat/completions: the chunks of a stream, and the whole completion.

Format: developers.openai.com/api/reference/resources/chat (chat.completion and chat.completion.chunk). Reasoning is in
`reasoning_content`, as DeepSeek's API has it. An answer that was asked to be JSON says whether it is, in the choice's
`response_format`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from services.front.http.errors import problem_of
from services.front.http.openai.errors import error_body
from services.front.http.parts import format_body, token_body
from services.front.http.sse import Payload, TextFrame, data_frame
from shared.errors import ServiceError


class ChatEncoder:
    """Give it every event of one answer; `whole` is the completion after the last."""

    def __init__(self, answer_id: str, created: int, model: str, *, with_usage: bool, with_logprobs: bool) -> None:
        """`created` is in Unix seconds; `with_usage` adds the chunk of counts."""
        self._head = {"id": answer_id, "created": created, "model": model}
        self._with_usage = with_usage
        self._with_logprobs = with_logprobs
        # Made while the request waits for the worker, so that no token waits for them.
        self._start_frame = data_frame(self._chunk({"role": "assistant", "content": ""}))
        self._text_frame = TextFrame(data_frame, lambda text: self._chunk({"content": text}, logprobs=[]))
        self._reasoning_frame = TextFrame(data_frame, lambda text: self._chunk({"reasoning_content": text}))
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._call: dict[str, Any] = {}
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finished: Finished | None = None

    def encode(self, event: Event) -> Sequence[Payload | bytes]:
        match event:
            case Queued():
                return []
            case Started():
                return [self._start_frame]
            case TextDelta(text, ()):
                self._text.append(text)
                return [self._text_frame(text)]
            case TextDelta(text, logprobs):
                self._text.append(text)
                tokens = [token_body(token) for token in logprobs]
                self._logprobs += tokens
                return [self._chunk({"content": text}, logprobs=tokens)]
            case ReasoningDelta(text):
                self._reasoning.append(text)
                return [self._reasoning_frame(text)]
            case ToolCallDelta():
                return [self._chunk({"tool_calls": [self._call_delta(event)]})]
            case ToolCallDone(_, arguments):
                function = self._call["function"] | {"arguments": arguments}
                self._calls.append(self._call | {"function": function})
                return []
            case Finished():
                return self._finish(event)

    def fail(self, error: ServiceError) -> list[dict[str, Any]]:
        return [error_body(problem_of(error))]

    @property
    def whole(self) -> dict[str, Any]:
        assert self._finished is not None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text), "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        logprobs = {"content": self._logprobs, "refusal": None} if self._with_logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs} | _ending(self._finished)
        usage = usage_body(self._finished.usage)
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": usage}

    def _call_delta(self, delta: ToolCallDelta) -> dict[str, Any]:
        if not delta.id:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        function = {"name": delta.name, "arguments": delta.arguments}
        self._call = {"id": delta.id, "type": "function", "function": function}
        return {"index": delta.index} | self._call

    def _finish(self, event: Finished) -> list[dict[str, Any]]:
        self._finished = event
        chunks = [self._chunk({}, ending=_ending(event))]
        if self._with_usage:
            counts = {"choices": [], "usage": usage_body(event.usage)}
            chunks.append(self._head | {"object": "chat.completion.chunk"} | counts)
        return chunks

    def _chunk(
        self,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        ending: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._with_logprobs and logprobs is not None:
            choice["logprobs"] = {"content": logprobs, "refusal": None}
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice | (ending or {})]}
        return chunk | {"usage": None} if self._with_usage else chunk


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts; those of the details are among the others."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _ending(event: Finished) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": event.reason}
    if event.stop_text is not None:
        ending["stop_reason"] = event.stop_text
    return ending | format_body(event)
