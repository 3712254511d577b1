"""From the worker's tokens to the chunks that a client gets, for one request.

Pure: time comes in as an argument. Knows no socket.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from services.front.chat.dsml import CompletedCall
from services.front.chat.format import EOS
from services.front.chat.parser import CompletionParser, Delta
from services.front.chat.strict import MalformedCompletion, parse_strict
from services.front.detokenizer import Detokenizer
from services.front.prompt import Prompt
from services.front.tokenizer import Tokenizer
from shared.protocol.messages import TextChunk, TokensGenerated


class Answer:
    """Give it every `TokensGenerated` of a request, then `end` it."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.request = prompt.generate
        self._thinking = prompt.thinking
        self._parser = CompletionParser(thinking=prompt.thinking, schemas=prompt.schemas)
        self._detokenizer = Detokenizer(tokenizer.token_bytes)
        self._raw: list[str] = []
        self._calls: list[CompletedCall] = []
        self._worker_reason = ""
        self.prompt_tokens = len(prompt.generate.prompt_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.ttft_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Nothing that the worker may still say would change the answer."""
        return self._parser.finished or bool(self._worker_reason)

    def add(self, tokens: TokensGenerated, elapsed_s: float) -> TextChunk | None:
        """The chunk that these tokens complete, if any; `elapsed_s` is the age of the request."""
        self.completion_tokens = tokens.completion_tokens
        self.cached_tokens = tokens.cached_tokens
        self._worker_reason = tokens.finish_reason
        if tokens.token_ids and not self.ttft_s:
            self.ttft_s = elapsed_s
        text = self._detokenizer.feed(tokens.token_ids)
        self._raw.append(text)
        delta = self._parser.feed(text)
        self._calls += delta.calls
        return self._chunk(delta, "", elapsed_s) if delta.text or delta.reasoning else None

    def end(self, elapsed_s: float, reason: str = "") -> TextChunk:
        """The final chunk. `reason` is for an end that the worker did not bring about."""
        rest = self._detokenizer.flush()
        self._raw.append(rest)
        held = self._parser.feed(rest)
        ending = self._parser.finish(self._worker_reason or reason or "stop")
        last = ending.delta
        self._calls += (*held.calls, *last.calls)
        delta = Delta(held.reasoning + last.reasoning, held.text + last.text)
        return self._chunk(delta, ending.finish_reason, elapsed_s, self._calls)

    @property
    def is_well_formed(self) -> bool:
        """Whether a complete answer keeps to the vendor's format, or had to be forgiven something."""
        try:
            parse_strict("".join(self._raw).removesuffix(EOS) + EOS, thinking=self._thinking)
        except MalformedCompletion:
            return False
        return True

    def _chunk(
        self, delta: Delta, finish_reason: str, elapsed_s: float, calls: Sequence[CompletedCall] = ()
    ) -> TextChunk:
        return TextChunk(
            text=delta.text,
            reasoning=delta.reasoning,
            tool_calls_json=_calls_json(calls) if calls else "",
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            ttft_s=self.ttft_s,
            elapsed_s=elapsed_s,
        )


def _calls_json(calls: Sequence[CompletedCall]) -> str:
    """OpenAI-style tool calls; the ids are new, for the tool's result to name."""
    return json.dumps(
        [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ],
        ensure_ascii=False,
    )
