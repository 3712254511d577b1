"""The body of POST /v1/responses as a `GenerationRequest`.

Format: developers.openai.com/api/reference/resources/responses. Nothing is stored here, so everything that refers to an
earlier response is refused; fields that only concern OpenAI's own service (store, service_tier, ...) are ignored. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.front.chat.messages import ChatError
from services.front.effort import EFFORTS
from services.front.generation import ANY_FUNCTION, Conversation, GenerationRequest, Sampling
from services.front.http.conversation import function_tool
from services.front.http.fields import Fields
from services.front.http.openai.request import MAX_TOP_LOGPROBS
from services.front.http.responses.items import read_conversation

_NOT_STORED = "responses are not stored here; send the whole conversation in input"
_UNSUPPORTED = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "prompt": "prompt templates are not stored here; send instructions and input",
    "background": "an answer lives as long as its connection; use stream",
}


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """`echo` are the fields of the request that the response repeats."""

    generation: GenerationRequest
    is_stream: bool
    echo: dict[str, Any]


def read_request(body: Any) -> ResponsesRequest:
    """Raises:
    ChatError: a field is missing, of the wrong type, out of range, or asks for what this front cannot do.
    """
    fields = Fields(body)
    for key, why in _UNSUPPORTED.items():
        if fields.raw(key):
            raise ChatError(f"{key} is not supported: {why}")
    sampling = Sampling(
        max_tokens=fields.whole("max_output_tokens", 0, 1 if fields.has("max_output_tokens") else 0),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.share("top_p", 1.0),
        top_logprobs=_read_top_logprobs(fields),
    )
    fields.text("model", "")
    prompt = _read_prompt(fields)
    echo = {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": sampling.max_tokens or None,
        "metadata": fields.table("metadata").values,
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "reasoning": {"effort": fields.table("reasoning").raw("effort"), "summary": None},
        "temperature": sampling.temperature,
        "text": fields.table("text").values or {"format": {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.items("tools"),
        "top_logprobs": max(sampling.top_logprobs, 0),
        "top_p": sampling.top_p,
        "user": fields.raw("user"),
    }
    return ResponsesRequest(GenerationRequest(prompt, sampling), fields.flag("stream", False), echo)


def _read_prompt(fields: Fields) -> Conversation:
    reasoning = fields.table("reasoning")
    effort = reasoning.choice("effort", ("none", *EFFORTS)) if reasoning.has("effort") else None
    thinking = bool(reasoning.values) and effort != "none"
    tools = tuple(map(_read_tool, fields.tables("tools")))
    return Conversation(
        messages=tuple(read_conversation(fields)),
        thinking=thinking,
        effort=effort if thinking else None,
        tools=() if fields.raw("tool_choice") == "none" else tools,
        forced_call=_read_forced_call(fields),
        max_calls=_read_max_calls(fields),
        json_schema=_read_schema(fields.table("text").table("format")),
        schema_place="text.format.schema",
    )


def _read_top_logprobs(fields: Fields) -> int:
    """-1 unless the client asks for a number of them, or for them at all."""
    if fields.has("top_logprobs"):
        return fields.whole("top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    return 0 if "message.output_text.logprobs" in fields.items("include") else -1


def _read_tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type")
    if kind != "function":
        raise ChatError(f"{tool.place('type')}: only function tools are supported, not {kind[:40]!r}")
    return function_tool(tool.text("name"), tool.text("description", ""), tool.table("parameters").values)


def _read_forced_call(fields: Fields) -> str | None:
    if isinstance(fields.raw("tool_choice"), str):
        kind = fields.choice("tool_choice", ("auto", "none", "required"))
        return ANY_FUNCTION if kind == "required" else None
    choice = fields.table("tool_choice")
    if not choice.values:
        return None
    choice.choice("type", ("function",))
    return choice.text("name")


def _read_max_calls(fields: Fields) -> int | None:
    if fields.raw("tool_choice") == "none":
        return 0
    return None if fields.flag("parallel_tool_calls", True) else 1


def _read_schema(text_format: Fields) -> Any:
    kind = text_format.choice("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    return Fields(text_format.raw("schema"), text_format.place("schema")).values
