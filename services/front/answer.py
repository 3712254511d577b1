"""From the worker's tokens to the events that a client gets, for one request.

Pure: time comes in as an argument. Knows no socket.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from services.front.chat.dsml import ArgumentsPiece, CallBegun, CallEvent, CompletedCall
from services.front.chat.format import EOS
from services.front.chat.parser import CompletionParser, Delta, Ending
from services.front.chat.strict import MalformedCompletion, parse_strict
from services.front.detokenizer import Detokenizer
from services.front.generation import (
    Conversation,
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallDone,
    Usage,
)
from services.front.prompt import Prompt
from services.front.stop import StopFinder
from services.front.tokenizer import Tokenizer
from shared.protocol.messages import TokensGenerated


class Answer:
    """Give it every `TokensGenerated` of a request until it `is_complete`, then `end` it."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.generate = prompt.generate
        self._prompt = prompt
        chat = prompt.request.prompt
        self._chat = chat if isinstance(chat, Conversation) else None
        self._max_calls = self._chat.max_calls if self._chat else None
        self._parser: CompletionParser | _Plain = (
            CompletionParser(thinking=prompt.thinking, schemas=prompt.schemas) if self._chat else _Plain()
        )
        self._opening = self._parser.feed(prompt.opening)  # a forced call is begun in the prompt
        self._stop = StopFinder(prompt.request.stop)
        self._token_bytes = tokenizer.token_bytes
        self._detokenizer = Detokenizer(tokenizer.token_bytes)
        self._raw: list[str] = [prompt.opening]
        self._text: list[str] = []
        self._num_raw = len(prompt.opening)  # characters
        self._num_text = 0
        # Each with the raw characters that it is part of.
        self._logprobs: deque[tuple[range, TokenLogprob]] = deque()
        self._num_calls = 0
        self._worker_reason = ""
        self._is_started = False
        self._completion_tokens = self._cached_tokens = self._reasoning_tokens = 0
        self._ttft_s = self._elapsed_s = 0.0

    @property
    def usage(self) -> Usage:
        """Of the request so far."""
        return Usage(
            prompt_tokens=len(self.generate.prompt_ids),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            reasoning_tokens=self._reasoning_tokens,
            ttft_s=self._ttft_s,
            elapsed_s=self._elapsed_s,
        )

    @property
    def text(self) -> str:
        """So far, without reasoning and calls."""
        return "".join(self._text)

    @property
    def json_schema(self) -> Mapping[str, Any] | bool | None:
        """What the text was asked to follow."""
        return self._chat.json_schema if self._chat else None

    @property
    def is_complete(self) -> bool:
        """Nothing that the worker may still say would change the answer."""
        return self._parser.finished or bool(self._worker_reason) or self._is_cut

    @property
    def _is_cut(self) -> bool:
        """The client wanted no more than this."""
        has_called = bool(self._max_calls) and self._num_calls == self._max_calls
        return has_called or self._stop.found is not None

    def add(self, tokens: TokensGenerated, elapsed_s: float) -> list[Event]:
        """The events that these tokens complete; `elapsed_s` is the age of the request."""
        events: list[Event] = []
        self._worker_reason = tokens.finish_reason
        self._completion_tokens, self._cached_tokens = tokens.completion_tokens, tokens.cached_tokens
        self._elapsed_s = elapsed_s
        self._ttft_s = self._ttft_s or (elapsed_s if tokens.token_ids else 0.0)
        if not self._is_started:
            self._is_started = True
            events += [Started(len(self.generate.prompt_ids), tokens.cached_tokens), *self._events(self._opening)]
        for i, token in enumerate(tokens.token_ids):
            self._reasoning_tokens += self._parser.in_reasoning
            text = self._detokenizer.feed((token,))
            if tokens.logprobs:
                self._logprobs.append((self._place(text), self._logprob(tokens, i)))
            self._raw.append(text)
            self._num_raw += len(text)
            events += self._events(self._parser.feed(text))
            if self._parser.in_reasoning:
                self._logprobs.clear()
            if self.is_complete and not self._worker_reason:
                break
        return events

    def end(self, elapsed_s: float, reason: str = "") -> list[Event]:
        """The last events. `reason` is for an end that the worker did not bring about."""
        rest = self._detokenizer.flush()
        self._raw.append(rest)
        events = list(self._events(self._parser.feed(rest)))
        ending = self._parser.finish(self._worker_reason or reason or "stop")
        events += [*self._events(ending.delta), *self._held_text()]
        self._elapsed_s = elapsed_s
        return [*events, self._finished(ending.finish_reason, reason)]

    @property
    def is_well_formed(self) -> bool:
        """Whether a complete answer keeps to the vendor's format, or had to be forgiven something."""
        if self._chat is None or self._is_cut:
            return True
        try:
            parse_strict("".join(self._raw).removesuffix(EOS) + EOS, thinking=self._prompt.thinking)
        except MalformedCompletion:
            return False
        return True

    def _finished(self, reason: str, cancelled: str) -> Finished:
        if self._is_cut and not cancelled:
            reason = "stop" if self._stop.found is not None else "tool_calls"
        elif reason == "tool_calls" and not self._num_calls:
            reason = "stop"  # all calls were dropped
        return Finished(reason, self.usage, self._stop.found)

    def _events(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield ReasoningDelta(delta.reasoning)
        if delta.text and not self._is_cut:
            yield from self._text_events(self._stop.feed(delta.text))
        if delta.calls:
            yield from self._held_text()
        for event in delta.calls:
            if self._max_calls != 0 and not self._is_cut:
                yield self._call_event(event)

    def _text_events(self, text: str) -> Iterator[Event]:
        """With the tokens that begin in it, and the one before them that reaches into it from a mark."""
        if not text:
            return
        self._text.append(text)
        self._num_text += len(text)
        start, end = self._parser.text_start, self._parser.text_start + self._num_text
        logprobs = []
        while self._logprobs and self._logprobs[0][0].start < end:
            place, logprob = self._logprobs.popleft()
            if place.stop > start:
                logprobs.append(logprob)
        yield TextDelta(text, tuple(logprobs))

    def _held_text(self) -> Iterator[Event]:
        """Text that looked like a stop text and is none, because the text ends here."""
        if not self._is_cut:
            yield from self._text_events(self._stop.flush())

    def _call_event(self, event: CallEvent) -> Event:
        """The id is new, for the tool's result to name. Only a call that is complete counts."""
        index = self._num_calls
        match event:
            case CallBegun(name):
                return ToolCallDelta(index, "", f"call_{secrets.token_hex(12)}", name)
            case ArgumentsPiece(text):
                return ToolCallDelta(index, text)
            case CompletedCall():
                self._num_calls += 1
                return ToolCallDone(index, event.arguments)

    def _place(self, text: str) -> range:
        """Of a token that completes `text`; it is part of one character at least, though maybe of its middle."""
        return range(self._num_raw, self._num_raw + max(len(text), 1))

    def _logprob(self, tokens: TokensGenerated, i: int) -> TokenLogprob:
        width = len(tokens.top_ids) // len(tokens.token_ids)
        place = slice(i * width, (i + 1) * width)
        top = zip(map(self._token_bytes, tokens.top_ids[place]), tokens.top_logprobs[place], strict=True)
        return TokenLogprob(self._token_bytes(tokens.token_ids[i]), tokens.logprobs[i], tuple(top))


class _Plain:
    """The parser of a completion that is no chat: everything is text."""

    finished = False
    in_reasoning = False
    text_start = 0

    def feed(self, piece: str) -> Delta:
        return Delta(text=piece)

    def finish(self, reason: str) -> Ending:
        return Ending(Delta(), reason)
