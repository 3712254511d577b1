"""An answer in the words of /v1/completions: the chunks of a stream, and the whole completion.

Format: developers.openai.com/api/reference/resources/completions (text_completion). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.front.generation import Event, Finished, TextDelta, TokenLogprob
from services.front.http.errors import problem_of
from services.front.http.openai.chat import usage_body
from services.front.http.openai.errors import error_body
from services.front.http.sse import Payload, TextFrame, data_frame
from shared.errors import ServiceError


class CompletionEncoder:
    """Give it every event of one answer; `whole` is the completion after the last."""

    def __init__(self, answer_id: str, created: int, model: str, *, with_usage: bool, with_logprobs: bool) -> None:
        """`created` is in Unix seconds; `with_usage` adds the chunk of counts."""
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._with_usage = with_usage
        self._with_logprobs = with_logprobs
        self._text_frame = TextFrame(data_frame, self._text_chunk)
        self._text: list[str] = []
        self._length = 0
        self._logprobs = _no_logprobs()
        self._finished: Finished | None = None

    def encode(self, event: Event) -> Sequence[Payload | bytes]:
        match event:
            case TextDelta(text) if not self._with_logprobs:
                self._text.append(text)
                return [self._text_frame(text)]
            case TextDelta(text, tokens):
                self._text.append(text)
                return [self._text_chunk(text, self._add(tokens))]
            case Finished(reason):
                self._finished = event
                chunks = [self._chunk({"text": "", "logprobs": None, "finish_reason": reason})]
                if self._with_usage:
                    chunks.append(self._head | {"choices": [], "usage": usage_body(event.usage)})
                return chunks
        return []

    def fail(self, error: ServiceError) -> list[dict[str, Any]]:
        return [error_body(problem_of(error))]

    @property
    def whole(self) -> dict[str, Any]:
        assert self._finished is not None
        choice = {
            "index": 0,
            "text": "".join(self._text),
            "logprobs": self._logprobs if self._with_logprobs else None,
            "finish_reason": self._finished.reason,
        }
        return self._head | {"choices": [choice], "usage": usage_body(self._finished.usage)}

    def _text_chunk(self, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._chunk({"text": text, "logprobs": logprobs, "finish_reason": None})

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | {"choices": [{"index": 0} | choice]}
        return chunk | {"usage": None} if self._with_usage else chunk

    def _add(self, tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        """The log-probabilities of a piece; `text_offset` counts letters from the beginning of the answer."""
        new = _no_logprobs()
        for token in tokens:
            name = _name(token.data)
            new["tokens"].append(name)
            new["token_logprobs"].append(token.logprob)
            new["top_logprobs"].append({_name(data): logprob for data, logprob in token.top})
            new["text_offset"].append(self._length)
            self._length += len(name)
        for key, values in new.items():
            self._logprobs[key] += values
        return new


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _name(data: bytes) -> str:
    return data.decode("utf-8", "replace")
