"""A conversation as the CLI keeps it: messages, options, and what a retry or a refusal does to them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.protocol.messages import Chat

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every request of a session asks for. `max_tokens` 0 is the service's default, `seed` -1 draws one.

    `think` is off (None), "on", or the name of a reasoning effort.
    """

    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = -1
    think: str | None = None

    def options(self) -> dict[str, Any]:
        """What the front's `Chat.options_json` says of this."""
        if self.think is None:
            return {}
        return {"thinking": True} | ({} if self.think == "on" else {"reasoning_effort": self.think})


@dataclass(slots=True)
class Answer:
    """The pieces of an answer, put together as they come."""

    text: str = ""
    reasoning: str = ""
    tool_calls_json: str = ""

    def add(self, text: str, reasoning: str, tool_calls_json: str) -> None:
        self.text += text
        self.reasoning += reasoning
        self.tool_calls_json = tool_calls_json or self.tool_calls_json

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return json.loads(self.tool_calls_json) if self.tool_calls_json else []

    def message(self) -> Message:
        made: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls_json:
            made["tool_calls"] = self.tool_calls
        return made


@dataclass(slots=True)
class Conversation:
    """`messages` holds what was answered: a question becomes part of it with its answer, results of tools at once."""

    sampling: Sampling
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start anew, with the same system message and tools."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def request(self, question: str | None) -> Chat:
        """The request that asks this next; None after the results of tools, which are a question in themselves."""
        options = self.sampling.options() | ({"tools": self.tools} if self.tools else {})
        return Chat(
            messages_json=json.dumps([*self.messages, *_asked(question)], ensure_ascii=False),
            max_tokens=self.sampling.max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=self.sampling.seed,
            options_json=json.dumps(options, ensure_ascii=False),
        )

    def keep(self, question: str | None, answer: Answer) -> None:
        """Add an exchange. One without any answer (cancelled at once) leaves no trace."""
        if answer.text or answer.reasoning or answer.tool_calls_json:
            self.messages += [*_asked(question), answer.message()]

    def add_result(self, call: Mapping[str, Any], result: str) -> None:
        """What a tool call of the last answer gave."""
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def take_back(self) -> str | None:
        """Remove the last question and all that followed; the question, or None if there is none."""
        for i in reversed(range(len(self.messages))):
            if self.messages[i]["role"] == "user":
                question = str(self.messages[i]["content"])
                del self.messages[i:]
                return question
        return None


def _asked(question: str | None) -> list[Message]:
    return [] if question is None else [{"role": "user", "content": question}]
