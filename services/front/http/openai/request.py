"""The bodies of POST /v1/chat/completions and /v1/completions as `GenerationRequest`s.

Format: developers.openai.com/api/reference/resources/chat and .../completions, with the additions that other servers of
open models made usual (top_k, min_p, reasoning_content, chat_template_kwargs) and DeepSeek's `thinking`. Fields that
only concern OpenAI's own service (user, metadata, store, ...) are ignored, and so are fields that nobody knows. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.front.chat.messages import ChatError, kind_of
from services.front.effort import EFFORTS
from services.front.generation import ANY_FUNCTION, Conversation, GenerationRequest, RawPrompt, Sampling
from services.front.http.fields import Fields
from services.front.stop import check_stops

MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
_INSTRUCTIONS = ("system", "developer")

# What would change the answer and is not there: refused unless it is left out, null, or this value.
_CHAT_FIXED: dict[str, tuple[Any, str]] = {
    "n": (1, "one answer a request"),
    "functions": ([], "use tools"),
    "audio": (None, "this model writes text"),
    "modalities": (["text"], "this model writes text"),
    "logit_bias": ({}, "the sampler has no such thing"),
    "frequency_penalty": (0, "the sampler has no such thing"),
    "presence_penalty": (0, "the sampler has no such thing"),
}
_COMPLETION_FIXED: dict[str, tuple[Any, str]] = {
    "n": (1, "one answer a request"),
    "best_of": (1, "one answer a request"),
    "echo": (False, "the prompt is not sent back"),
    "suffix": ("", "this model continues, it does not fill in"),
    "logit_bias": ({}, "the sampler has no such thing"),
    "frequency_penalty": (0, "the sampler has no such thing"),
    "presence_penalty": (0, "the sampler has no such thing"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """`with_usage`: a stream ends with a chunk of token counts."""

    generation: GenerationRequest
    is_stream: bool
    with_usage: bool


def read_chat(body: Any) -> Asked:
    """Raises:
    ChatError: a field is missing, of the wrong type, out of range, or asks for what this front cannot do.
    """
    fields = Fields(body)
    _check_fixed(fields, _CHAT_FIXED)
    top = fields.whole("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if fields.has("top_logprobs") and not fields.flag("logprobs", False):
        raise ChatError("top_logprobs needs logprobs: true")
    sampling = _read_sampling(fields, _read_max_tokens(fields), top if fields.flag("logprobs", False) else -1)
    return _asked(fields, _read_conversation(fields), sampling)


def read_completion(body: Any) -> Asked:
    """Raises:
    ChatError: as `read_chat`.
    """
    fields = Fields(body)
    _check_fixed(fields, _COMPLETION_FIXED)
    max_tokens = fields.whole("max_tokens", DEFAULT_COMPLETION_TOKENS, 1)
    top = fields.whole("logprobs", None, 0, MAX_TOP_LOGPROBS) if fields.has("logprobs") else -1
    sampling = _read_sampling(fields, max_tokens, top)
    return _asked(fields, _read_raw_prompt(fields), sampling)


def _asked(fields: Fields, prompt: Conversation | RawPrompt, sampling: Sampling) -> Asked:
    fields.text("model", "")
    generation = GenerationRequest(prompt, sampling, _read_stop(fields))
    with_usage = fields.table("stream_options").flag("include_usage", False)
    return Asked(generation, fields.flag("stream", False), with_usage)


def _check_fixed(fields: Fields, fixed: dict[str, tuple[Any, str]]) -> None:
    for key, (only, why) in fixed.items():
        value = fields.raw(key)
        # `True == 1` in Python, but not in JSON.
        if value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            raise ChatError(f"{key} can only be {json.dumps(only)} here ({why}), not {json.dumps(value):.80}")


def _read_max_tokens(fields: Fields) -> int:
    """The newer name counts; 0 if neither is there."""
    key = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    return fields.whole(key, None, 1) if fields.has(key) else 0


def _read_sampling(fields: Fields, max_tokens: int, top_logprobs: int) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.share("top_p", 1.0),
        top_k=max(0, fields.whole("top_k", 0, -1)),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=_read_seed(fields),
        top_logprobs=top_logprobs,
    )


def _read_seed(fields: Fields) -> int:
    """Any 64-bit number, -1 for one that is drawn; negative ones count as what their bits say."""
    seed = fields.whole("seed", -1, -(2**63), 2**63 - 1)
    return seed if seed >= -1 else seed & (2**63 - 1)


def _read_stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.raw("stop")
    stops = (stop,) if isinstance(stop, str) and stop else fields.texts("stop") if stop else ()
    check_stops(stops, "stop")
    return stops


def _read_raw_prompt(fields: Fields) -> RawPrompt:
    """A text, a list of token ids, or a list of one of these."""
    prompt = fields.raw("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return RawPrompt(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return RawPrompt(tuple(prompt))
    raise ChatError("prompt must be one text or one list of token ids")


def _read_conversation(fields: Fields) -> Conversation:
    messages = _read_messages(fields)
    choice, names = fields.raw("tool_choice"), _tool_names(fields)
    return Conversation(
        messages=messages,
        thinking=_read_thinking(fields),
        effort=_read_effort(fields),
        tools=() if choice == "none" else tuple(fields.items("tools")),
        forced_call=_read_forced_call(fields, names),
        max_calls=0 if choice == "none" else None if fields.flag("parallel_tool_calls", True) else 1,
        json_schema=_read_schema(fields.table("response_format")),
        schema_place="response_format.json_schema.schema",
    )


def _read_messages(fields: Fields) -> tuple[Any, ...]:
    """`developer` is OpenAI's newer name for `system`, not the model's own role of that name, which it forgets.

    Instructions at the beginning are the system message; later ones are a user's words, for those get an answer. With
    DeepSeek's `prefix` a last message of the assistant is continued.
    """
    messages = fields.items("messages")
    if not messages:
        raise ChatError("messages must be a list with at least one message")
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in _INSTRUCTIONS), len(roles))
    read = [
        message | {"role": "system" if i < first else "user"} if role in _INSTRUCTIONS else message
        for i, (message, role) in enumerate(zip(messages, roles, strict=True))
    ]
    if roles[-1] == "assistant" and read[-1].get("prefix") is True and not read[-1].get("tool_calls"):
        read[-1] = read[-1] | {"wo_eos": True}
    return tuple(read)


def _read_thinking(fields: Fields) -> bool:
    """Reasoning is off unless something asks for it: an effort, DeepSeek's `thinking` or a template's switch."""
    switch = fields.table("thinking")
    if switch.values:
        return switch.choice("type", ("enabled", "disabled")) == "enabled"
    template = fields.table("chat_template_kwargs")
    for key in ("thinking", "enable_thinking"):
        if template.has(key):
            return template.flag(key, False)
    return fields.has("reasoning_effort") and fields.raw("reasoning_effort") != "none"


def _read_effort(fields: Fields) -> str | None:
    if not fields.has("reasoning_effort"):
        return None
    effort = fields.choice("reasoning_effort", ("none", *EFFORTS))
    return None if effort == "none" else effort


def _tool_names(fields: Fields) -> list[str]:
    names = []
    for tool in fields.tables("tools"):
        tool.choice("type", ("function",), "function")
        function = tool.table("function")
        function.table("parameters")  # the model reads them as they are, but only an object can be a schema
        names.append(function.text("name"))
    return names


def _read_forced_call(fields: Fields, names: list[str]) -> str | None:
    if isinstance(fields.raw("tool_choice"), str):
        kind = fields.choice("tool_choice", ("auto", "none", "required"))
        if kind != "required":
            return None
        if not names:
            raise ChatError("tool_choice is required, but there are no tools")
        return ANY_FUNCTION
    choice = fields.table("tool_choice")
    if not choice.values:
        return None
    choice.choice("type", ("function",))
    name = choice.table("function").text("name")
    if name not in names:
        raise ChatError(f"tool_choice.function.name must be one of the tools, not {name[:40]!r}")
    return name


def _read_schema(response_format: Fields) -> Any:
    if not response_format.values:
        return None
    kind = response_format.choice("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = response_format.table("json_schema")
    schema = described.raw("schema")
    if not isinstance(schema, Mapping | bool):
        raise ChatError(f"{described.place('schema')} must be a JSON schema, not {kind_of(schema)}")
    return schema
