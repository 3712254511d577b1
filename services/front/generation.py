"""What every way into the front asks for, and what it gets: one request value, one stream of events.

The ZeroMQ socket and each HTTP dialect translate their own words into a `GenerationRequest`, hand it to
`Answers.start`, and translate the `Event`s that come back. Pure values: they know no socket, no JSON of any dialect and
no token of the chat format.

A stream is `Queued` once or more, then one `Started`, then text, reasoning and tool calls in the order in which the
model wrote them, then one `Finished`. A request that is cancelled may be finished without having started; one that
fails raises ServiceError instead, before or within the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANY_FUNCTION = ""
# Letters of a prompt that takes well below a millisecond to make.
SHORT = 2_000


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, and how many at most.

    `max_tokens` 0 asks for the deployment's default. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off;
    seed -1 draws one. `top_logprobs` -1 is off; n asks for each token's log-probability and the n likeliest.
    """

    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = -1
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form of OpenAI's chat completions, whatever dialect they came in; the front checks them.

    `effort` is one of the levels of `services.front.effort`, or None for the checkpoint's default; it counts only with
    `thinking`. `tools` are OpenAI-style tool definitions. `forced_call` None lets the model decide, `ANY_FUNCTION`
    makes it call one of the tools and a name makes it call that one: the answer is begun for it, so reasoning is
    skipped. With `max_calls` the answer ends after so many calls; with 0 those that the model makes nevertheless are
    dropped. `json_schema` is the schema that the answer is asked to follow, `schema_place` the field it came in.
    """

    messages: tuple[Any, ...]
    thinking: bool = False
    effort: str | None = None
    drop_thinking: bool = True
    tools: tuple[Any, ...] = ()
    forced_call: str | None = None
    max_calls: int | None = None
    json_schema: Mapping[str, Any] | bool | None = None
    schema_place: str = ""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text or token ids to continue, as they are. Control tokens in the text count; a missing BOS is put in front."""

    content: str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to make. `stop` are texts that end it; they are looked for in its text, not in reasoning or calls."""

    prompt: Conversation | RawPrompt
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()


def is_short(request: GenerationRequest) -> bool:
    """Whether its prompt is made sooner than another thread is woken."""
    if isinstance(request.prompt, RawPrompt):
        return len(request.prompt.content) <= SHORT
    room, values = SHORT, [request.prompt.messages, request.prompt.tools, request.prompt.json_schema]
    while values and room >= 0:
        value = values.pop()
        room -= len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
    return room >= 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and seconds of one request so far; reasoning counts as completion too, cached as prompt too.

    Times count from the arrival of the request, queueing included; `ttft_s` is 0 until the first token.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    ttft_s: float = 0.0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer's text. `data` is what it stands for, which may be part of a character.

    `top` are the likeliest tokens at this place, as (bytes, log-probability).
    """

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits for `place` others that came before it. Sent again whenever that number falls."""

    place: int


@dataclass(frozen=True, slots=True)
class Started:
    """The model has read the prompt. `cached_tokens` of it did not need to be read again."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer. Log-probabilities come if asked for, of the tokens that begin in this text."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning, which ends where text or calls begin."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index` (from 0): its first one has `id` and `name`, all may have text of `arguments`.

    The pieces of `arguments` together are the text of a JSON object. Calls do not interleave. A call that is not
    followed by its `ToolCallDone` was cut off: a stream has shown what there is of it, a whole answer leaves it out.
    """

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallDone:
    """Call number `index` is complete. `arguments` says what its pieces say, each parameter once."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Why the answer ended: stop, length, tool_calls, or abort if someone cancelled it.

    `stop_text` is which of the request's stop texts ended it, if one did. `format_error` says what is wrong with an
    answer that was asked to follow a schema; "" if nothing is, None if none was asked for.
    """

    reason: str
    usage: Usage
    stop_text: str | None = None
    format_error: str | None = None


Event = Queued | Started | TextDelta | ReasoningDelta | ToolCallDelta | ToolCallDone | Finished
