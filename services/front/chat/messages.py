"""Messages as people send them (OpenAI-style JSON) turned into the turns the chat format knows.

Owns the checks of shape, the merging of neighbouring user and tool messages, the order of tool results and the
forgetting of old reasoning. Knows nothing of control tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from services.front.chat.format import TASKS


class ChatError(ValueError):
    """A conversation that cannot be written in the model's format; the message names the field."""


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    REMINDER = "latest_reminder"


# The roles that open a turn which the assistant answers.
ASKING = (Role.USER, Role.DEVELOPER)


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a user turn: its own words, or the result of the tool call with this id."""

    text: str
    is_result: bool = False
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is what the sender gave: JSON text in the usual case, any JSON value otherwise."""

    name: str
    arguments: Any
    id: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    blocks: tuple[Block, ...]
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Any = None
    task: str | None = None
    open_ended: bool = False

    @property
    def text(self) -> str:
        return self.blocks[0].text


def read_turns(messages: Sequence[Any]) -> list[Turn]:
    """Check the messages and merge neighbouring user and tool messages into one user turn.

    A user turn with a task stands alone, and so does what follows it.

    Raises:
        ChatError: a message has the wrong shape.
    """
    groups: list[list[Turn]] = []
    for position, message in enumerate(messages):
        turn = _read(message, f"messages[{position}]")
        first = groups[-1][0] if groups else None
        if turn.role is Role.USER and first is not None and first.role is Role.USER and first.task is None:
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return [replace(group[0], blocks=tuple(b for turn in group for b in turn.blocks)) for group in groups]


def _read(message: Any, where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise ChatError(f"{where} must be an object, not {kind_of(message)}")
    role = _one_of(Role, message.get("role"), f"{where}.role")
    task = None if message.get("task") is None else _one_of(TASKS, message["task"], f"{where}.task")
    return _READERS[Role(role)](message, where, task)


def _one_of(known: Iterable[str], value: Any, where: str) -> str:
    names = list(map(str, known))
    if value not in names:
        raise ChatError(f"{where} must be one of {', '.join(names)}, not {value!r}")
    return str(value)


def _read_system(message: Mapping[str, Any], where: str, task: str | None) -> Turn:
    text = _text(message, "content", where, null_is_empty=True)
    return _instructions(Role.SYSTEM, text, message, where, task)


def _read_developer(message: Mapping[str, Any], where: str, task: str | None) -> Turn:
    text = _text(message, "content", where)
    if not text:
        raise ChatError(f"{where}.content of a developer message must not be empty")
    return _instructions(Role.DEVELOPER, text, message, where, task)


def _instructions(role: Role, text: str, message: Mapping[str, Any], where: str, task: str | None) -> Turn:
    tools, response_format = read_tools(message.get("tools"), f"{where}.tools"), message.get("response_format")
    return Turn(role, (Block(text),), tools=tools, response_format=response_format, task=task)


def _read_user(message: Mapping[str, Any], where: str, task: str | None) -> Turn:
    return Turn(Role.USER, (Block(_text(message, "content", where)),), task=task)


def _read_reminder(message: Mapping[str, Any], where: str, task: str | None) -> Turn:
    return Turn(Role.REMINDER, (Block(_text(message, "content", where)),), task=task)


def _read_assistant(message: Mapping[str, Any], where: str, task: str | None) -> Turn:
    calls = tuple(
        _read_call(call, f"{where}.tool_calls[{i}]")
        for i, call in enumerate(_list(message.get("tool_calls"), f"{where}.tool_calls"))
    )
    text = _text(message, "content", where, null_is_empty=True)
    reasoning = _text(message, "reasoning_content", where, null_is_empty=True)
    open_ended = bool(message.get("wo_eos"))
    return Turn(Role.ASSISTANT, (Block(text),), reasoning=reasoning, calls=calls, task=task, open_ended=open_ended)


def _read_tool(message: Mapping[str, Any], where: str, task: str | None) -> Turn:
    call_id = _text(message, "tool_call_id", where, null_is_empty=True)
    text = _result_text(message.get("content"), f"{where}.content")
    return Turn(Role.USER, (Block(text, is_result=True, call_id=call_id),), task=task)


_READERS = {
    Role.SYSTEM: _read_system,
    Role.DEVELOPER: _read_developer,
    Role.USER: _read_user,
    Role.ASSISTANT: _read_assistant,
    Role.TOOL: _read_tool,
    Role.REMINDER: _read_reminder,
}


_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}


def kind_of(value: Any) -> str:
    """What a JSON value is, in words for complaints."""
    return _KINDS.get(type(value)) or "a number"


def _text(message: Mapping[str, Any], key: str, where: str, *, null_is_empty: bool = False) -> str:
    value = message.get(key, "")
    if value is None and null_is_empty:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"{where}.{key} must be text, not {kind_of(value)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ChatError(f"{where} must be a list, not {kind_of(value)}")
    return value


def _read_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or "arguments" not in function:
        raise ChatError(f"{where} must have function.name and function.arguments")
    return ToolCall(function["name"], function["arguments"], _text(call, "id", where, null_is_empty=True))


def read_tools(tools: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """The function descriptions out of a list of OpenAI-style tools.

    Raises:
        ChatError: not a list, or an entry without a named function.
    """
    functions = []
    for i, tool in enumerate(_list(tools, where)):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(f"{where}[{i}] must have function.name")
        functions.append(function)
    return tuple(functions)


def _result_text(content: Any, where: str) -> str:
    """A tool's answer; null prints as the vendor's encoder prints it, parts that are not text by their type."""
    if content is None or isinstance(content, str):
        return str(content)
    return "\n\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(_list(content, where)))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise ChatError(f"{where} must be an object, not {kind_of(part)}")
    return _text(part, "text", where) if part.get("type") == "text" else f"[Unsupported {part.get('type')}]"


def order_results(turns: Sequence[Turn]) -> list[Turn]:
    """Tool results in the order of the calls they answer; a result of an unknown call counts as the first call's.

    Results change places among themselves; words in between stay where they are.
    """
    ordered: list[Turn] = []
    position: dict[str, int] = {}
    for turn in turns:
        if turn.role is Role.ASSISTANT and turn.calls:
            position = {call.id: i for i, call in enumerate(turn.calls)}
        results = iter(sorted((b for b in turn.blocks if b.is_result), key=lambda b: position.get(b.call_id, 0)))
        blocks = tuple(next(results) if block.is_result else block for block in turn.blocks)
        ordered.append(replace(turn, blocks=blocks))
    return ordered


def last_asking(turns: Sequence[Turn]) -> int:
    """Index of the last user or developer turn; -1 if there is none."""
    return max((i for i, turn in enumerate(turns) if turn.role in ASKING), default=-1)
