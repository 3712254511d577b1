"""The body of POST /v1/messages as a `GenerationRequest`.

Format: platform.claude.com/docs/en/api/messages. Fields that only concern Anthropic's own service (metadata,
cache_control, service_tier, ...) are ignored. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.front.chat.messages import ChatError
from services.front.effort import EFFORTS
from services.front.generation import ANY_FUNCTION, Conversation, GenerationRequest, Sampling
from services.front.http.anthropic.messages import read_conversation
from services.front.http.conversation import function_tool
from services.front.http.fields import Fields
from services.front.stop import check_stops

# Thinking budgets below this many tokens ask for little effort.
LOW_BUDGET = 4096


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    generation: GenerationRequest
    is_stream: bool


def read_request(body: Any) -> MessagesRequest:
    """Raises:
    ChatError: a field is missing, of the wrong type, out of range, or asks for what this model cannot do.
    """
    fields = Fields(body)
    sampling = Sampling(
        max_tokens=fields.whole("max_tokens", None, 1),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.share("top_p", 1.0),
        top_k=fields.whole("top_k", 0, 0),
    )
    stops = fields.texts("stop_sequences")
    check_stops(stops, "stop_sequences")
    fields.text("model", "")
    return MessagesRequest(GenerationRequest(read_prompt(fields), sampling, stops), fields.flag("stream", False))


def read_prompt(fields: Fields) -> Conversation:
    """What the model reads; the same for messages and for counting their tokens.

    Raises:
        ChatError: as `read_request`.
    """
    thinking, output = fields.table("thinking"), fields.table("output_config")
    is_thinking = thinking.choice("type", _THINKING, "disabled") != "disabled"
    effort = _read_effort(thinking, output)
    tools = tuple(map(_read_tool, fields.tables("tools")))
    choice = fields.table("tool_choice")
    return Conversation(
        messages=tuple(read_conversation(fields)),
        thinking=is_thinking,
        effort=effort if is_thinking else None,
        tools=() if choice.raw("type") == "none" else tools,
        forced_call=_read_forced_call(choice),
        max_calls=_read_max_calls(choice),
        json_schema=_read_schema(output.table("format")),
        schema_place="output_config.format.schema",
    )


_THINKING = ("disabled", "enabled", "adaptive", "between_tools")


def _read_effort(thinking: Fields, output: Fields) -> str | None:
    """The effort by name, or what a budget of thinking tokens suggests; the budget itself is no limit here."""
    if output.has("effort"):
        return output.choice("effort", EFFORTS)
    if not thinking.has("budget_tokens"):
        return None
    return "low" if thinking.whole("budget_tokens", None, 1) < LOW_BUDGET else "high"


def _read_tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type", "custom")
    if kind != "custom":
        raise ChatError(
            f"{tool.place('type')}: tools of type {kind[:40]!r} run on Anthropic's servers; only custom is supported"
        )
    schema = Fields(tool.raw("input_schema"), tool.place("input_schema"))
    return function_tool(tool.text("name"), tool.text("description", ""), schema.values)


def _read_forced_call(choice: Fields) -> str | None:
    kind = choice.choice("type", ("auto", "any", "tool", "none"), "auto")
    if kind == "tool":
        return choice.text("name")
    return ANY_FUNCTION if kind == "any" else None


def _read_max_calls(choice: Fields) -> int | None:
    if choice.raw("type") == "none":
        return 0
    return 1 if choice.flag("disable_parallel_tool_use", False) else None


def _read_schema(output_format: Fields) -> Any:
    if not output_format.values:
        return None
    output_format.choice("type", ("json_schema",))
    return Fields(output_format.raw("schema"), output_format.place("schema")).values
