"""A conversation as one prompt in the model's format.

The prompt is a list of segments, and each says whether its control tokens are meant. What people and tools wrote is
never trusted, so a user who types a control token gets its letters, not a turn. Knows no token id.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.front.chat.format import ASSISTANT, BOS, DSML, END_THINK, EOS, REMINDER, TASKS, THINK, USER, ChatFormat
from services.front.chat.messages import (
    ASKING,
    ChatError,
    Role,
    ToolCall,
    Turn,
    last_asking,
    order_results,
    read_turns,
)


class ThinkingMode(StrEnum):
    CHAT = "chat"
    THINKING = "thinking"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the prompt; control tokens inside `text` count only if it is `trusted`."""

    text: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to render.

    `drop_thinking` forgets the reasoning of turns before the last question, unless tools are in use.
    """

    mode: ThinkingMode = ThinkingMode.CHAT
    drop_thinking: bool = True
    effort: str | None = None
    add_bos: bool = True


def encode_chat(
    messages: Sequence[Any], chat_format: ChatFormat, options: ChatOptions, context: Sequence[Any] = ()
) -> list[Segment]:
    """The prompt for a conversation; with `context`, only what `messages` add to it.

    Raises:
        ChatError: a message has the wrong shape, or asks for what this checkpoint's format does not have.
    """
    if options.effort not in chat_format.efforts:
        known = ", ".join(str(e) for e in chat_format.efforts if e is not None) or "none"
        raise ChatError(f"reasoning_effort {options.effort!r} is not one of this checkpoint's: {known}")
    before, new = read_turns(context), read_turns(messages)
    turns = order_results(before + new)
    drops = options.mode is ThinkingMode.THINKING and options.drop_thinking and not any(t.tools for t in turns)
    writer = _Writer(chat_format, options.mode)
    if not before:
        writer.opening(options, has_turns=bool(new))
    last = last_asking(turns)
    shown = [i for i, turn in enumerate(turns) if not (drops and turn.role is Role.DEVELOPER and i < last)]
    for place, i in enumerate(shown):
        if i < len(before):
            continue
        previous = turns[shown[place - 1]] if place else None
        following = turns[shown[place + 1]] if place + 1 < len(shown) else None
        writer.turn(turns[i], previous, reasoned=not drops or i >= last)
        if following is None or following.role in (Role.ASSISTANT, Role.REMINDER):
            writer.hand_over(turns[i], reasoned=not drops or i >= last)
    return writer.segments


def rendered(segments: Sequence[Segment]) -> str:
    """The whole prompt as text, as the vendor's encoder would return it."""
    return "".join(segment.text for segment in segments)


class _Writer:
    """Collects the segments of a prompt."""

    def __init__(self, chat_format: ChatFormat, mode: ThinkingMode) -> None:
        self.segments: list[Segment] = []
        self._format = chat_format
        self._thinking = mode is ThinkingMode.THINKING

    def _own(self, text: str) -> None:
        self.segments.append(Segment(text, trusted=True))

    def _theirs(self, text: str) -> None:
        self.segments.append(Segment(text, trusted=False))

    def opening(self, options: ChatOptions, *, has_turns: bool) -> None:
        if options.add_bos:
            self._own(BOS)
        if self._thinking and has_turns:
            self._own(self._format.efforts[options.effort])

    def turn(self, turn: Turn, previous: Turn | None, *, reasoned: bool) -> None:
        if turn.role is Role.ASSISTANT:
            answers_task = previous is not None and previous.task is not None
            self._assistant(turn, reasoned=self._thinking and reasoned and not answers_task)
            return
        if turn.role is not Role.SYSTEM:
            self._own(REMINDER if turn.role is Role.REMINDER else USER)
        self._blocks(turn)
        self._tools(turn.tools)
        self._schema(turn.response_format)

    def _blocks(self, turn: Turn) -> None:
        for i, block in enumerate(turn.blocks):
            if i:
                self._own("\n\n")
            if block.is_result:
                self._own("<tool_result>")
                self._theirs(block.text)
                self._own("</tool_result>")
            else:
                self._theirs(block.text)

    def _assistant(self, turn: Turn, *, reasoned: bool) -> None:
        if reasoned:
            self._theirs(turn.reasoning)
            self._own(END_THINK)
        self._theirs(turn.text)
        if turn.calls:
            self._own(f"\n\n<{DSML}tool_calls>\n")
            for i, call in enumerate(turn.calls):
                self._own("\n" if i else "")
                self._call(call)
            self._own(f"\n</{DSML}tool_calls>")
        if not turn.open_ended:
            self._own(EOS)

    def _call(self, call: ToolCall) -> None:
        self._own(f'<{DSML}invoke name="')
        self._theirs(call.name)
        self._own('">\n')
        for i, (name, value) in enumerate(_parameters(call).items()):
            self._own(("\n" if i else "") + f'<{DSML}parameter name="')
            self._theirs(name)
            is_text = isinstance(value, str)
            self._own(f'" string="{"true" if is_text else "false"}">')
            self._theirs(value if is_text else json.dumps(value, ensure_ascii=False))
            self._own(f"</{DSML}parameter>")
        self._own(f"\n</{DSML}invoke>")

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if not tools:
            return
        if self._format.tools_template is None:
            raise ChatError("tools: this checkpoint has no encoding/encoding_dsv4.py that says how to describe them")
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        own = {"dsml_token": DSML, "thinking_start_token": THINK, "thinking_end_token": END_THINK}
        self._own("\n\n")
        self._template(self._format.tools_template, own, {"tool_schemas": schemas})

    def _schema(self, response_format: Any) -> None:
        if not response_format:
            return
        if self._format.response_template is None:
            raise ChatError("response_format: this checkpoint has no encoding/encoding_dsv4.py that says how to ask")
        self._own("\n\n")
        schema = json.dumps(response_format, ensure_ascii=False)
        self._template(self._format.response_template, {}, {"schema": schema})

    def _template(self, template: str, own: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        for literal, name, _, _ in string.Formatter().parse(template):
            self._own(literal)
            if name is None:
                continue
            if name in theirs:
                self._theirs(theirs[name])
            else:
                self._own(own[name])

    def hand_over(self, turn: Turn, *, reasoned: bool) -> None:
        """What makes the model speak after this turn."""
        think = THINK if self._thinking else END_THINK
        if turn.task is not None:
            self._own((ASSISTANT + think if turn.task == "action" else "") + TASKS[turn.task])
        elif turn.role in ASKING:
            self._own(ASSISTANT + (think if reasoned else END_THINK))


def _parameters(call: ToolCall) -> Mapping[str, Any]:
    """The named arguments; what is not JSON text goes as one parameter called "arguments"."""
    try:
        arguments = json.loads(call.arguments)
    except (TypeError, ValueError):
        return {"arguments": call.arguments}
    if not isinstance(arguments, dict):
        raise ChatError(f"arguments of the call of {call.name!r} must be a JSON object, not {call.arguments[:80]!r}")
    return arguments
