"""From a `Chat` message to what the worker is asked: checked, rendered, counted.

Pure: takes text apart and puts it together, and knows no socket. Whatever is wrong with a request is a bad_request
that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.front.chat.dsml import Schema
from services.front.chat.encoding import ChatOptions, Segment, ThinkingMode, encode_chat
from services.front.chat.format import ASSISTANT, END_THINK, EOS, ESSENTIAL_TOKENS, THINK, USER, ChatFormat
from services.front.chat.messages import ChatError, read_tools
from services.front.tokenizer import Tokenizer
from shared.errors import CheckpointError, ErrorCode, ServiceError
from shared.protocol.messages import Chat, Generate


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request ready for the worker. `schemas` are the parameter schemas of the offered functions, by name."""

    generate: Generate
    thinking: bool
    schemas: Mapping[str, Schema]


@dataclass(frozen=True, slots=True)
class _Options:
    """What `Chat.options_json` may say."""

    thinking: bool = False
    drop_thinking: bool = True
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


_OPTION_KINDS: dict[str, tuple[type, ...]] = {
    "thinking": (bool,),
    "drop_thinking": (bool,),
    "reasoning_effort": (str, type(None)),
    "tools": (list, type(None)),
    "response_format": (dict, type(None)),
}


class PromptMaker:
    """Makes prompts for one checkpoint."""

    def __init__(
        self, tokenizer: Tokenizer, chat_format: ChatFormat, max_context: int, default_max_tokens: int
    ) -> None:
        """Raises CheckpointError if the tokenizer lacks a control token that every turn needs."""
        missing = [token for token in ESSENTIAL_TOKENS if tokenizer.control_id(token) is None]
        if missing:
            raise CheckpointError(f"tokenizer.json lacks the added tokens {' '.join(missing)} of the chat format")
        self._tokenizer = tokenizer
        self._format = chat_format
        self._max_context = max_context
        self._default_max_tokens = default_max_tokens
        self._stop_ids = tuple(i for i in [tokenizer.control_id(EOS)] if i is not None)

    def make(self, chat: Chat) -> Prompt:
        """Check and render a request. `max_tokens` 0 asks for the default; an answer never outgrows the context.

        Raises:
            ServiceError: bad_request, naming the field or the numbers that do not fit.
        """
        try:
            options = _read_options(chat.options_json)
            messages = [_joined(m, f"messages[{i}]") for i, m in enumerate(_read_messages(chat.messages_json))]
            messages = _with_instructions(messages, options)
            segments = self._render(messages, options)
            self._check_length(sum(len(s.text) for s in segments) // self._tokenizer.longest, "at least ")
            ids = self._tokenizer.encode((s.text, s.trusted) for s in segments)
            schemas = _schemas(messages)
            return Prompt(self._generate(chat, tuple(ids)), _leaves_reasoning_open(segments), schemas)
        except ChatError as error:
            raise ServiceError(ErrorCode.BAD_REQUEST, str(error)) from None
        except RecursionError:
            raise ServiceError(ErrorCode.BAD_REQUEST, "the request is nested too deeply") from None

    def _render(self, messages: Sequence[Any], options: _Options) -> list[Segment]:
        mode = ThinkingMode.THINKING if options.thinking else ThinkingMode.CHAT
        chat_options = ChatOptions(mode, drop_thinking=options.drop_thinking, effort=options.reasoning_effort)
        segments = encode_chat(messages, self._format, chat_options)
        for segment in segments:
            if not _is_unicode(segment.text):
                raise ChatError("messages contain half a surrogate pair, which is no character")
        return segments

    def _check_length(self, num_tokens: int, at_least: str = "") -> None:
        """Called twice, so that a text that cannot fit is not taken apart first."""
        if num_tokens >= self._max_context:
            raise ChatError(
                f"the prompt has {at_least}{num_tokens} tokens, but model.max_context = {self._max_context} leaves "
                f"room for {self._max_context - 1} and one of answer; shorten it or raise model.max_context"
            )

    def _generate(self, chat: Chat, ids: tuple[int, ...]) -> Generate:
        self._check_length(len(ids))
        if chat.max_tokens < 0:
            raise ChatError(f"max_tokens must be at least 1, not {chat.max_tokens}")
        return Generate(
            prompt_ids=ids,
            max_tokens=min(chat.max_tokens or self._default_max_tokens, self._max_context - len(ids)),
            temperature=chat.temperature,
            top_p=chat.top_p,
            top_k=chat.top_k,
            min_p=chat.min_p,
            seed=chat.seed,
            stop_ids=self._stop_ids,
            boundaries=self._boundaries(ids),
        )

    def _boundaries(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Where conversations continue or part: before the first question, and where each answer began.

        An answer begins after the assistant's token and not after the thinking token behind it, because old turns are
        often written again with another one.
        """
        user, assistant = self._tokenizer.control_id(USER), self._tokenizer.control_id(ASSISTANT)
        first = next((i for i, id_ in enumerate(ids) if id_ == user), 0)
        answers = (i + 1 for i, id_ in enumerate(ids) if id_ == assistant)
        return tuple(sorted({first, *answers} - {0}))


def _read_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ChatError(f"{name} is not JSON: {error}") from None


def _read_messages(text: str) -> list[Any]:
    messages = _read_json(text, "messages")
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a list with at least one message")
    return messages


def _read_options(text: str) -> _Options:
    table = _read_json(text, "options")
    if not isinstance(table, dict):
        raise ChatError("options must be an object")
    for key, value in table.items():
        if key not in _OPTION_KINDS:
            raise ChatError(f"options.{key} is unknown (known: {', '.join(_OPTION_KINDS)})")
        if not isinstance(value, _OPTION_KINDS[key]):
            raise ChatError(f"options.{key} cannot be {value!r:.80}")
    return _Options(**table)


def _joined(message: Any, where: str) -> Any:
    """A message whose content came as a list of text parts, with that text; results of tools may hold other parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or message.get("role") == "tool":
        return message
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError(f"{where}.content[{i}]: only parts of type text are supported")
        texts.append(part["text"])
    return message | {"content": "\n\n".join(texts)}


def _with_instructions(messages: list[Any], options: _Options) -> list[Any]:
    """Tools and response format of the request go to the system message, which is made if there is none."""
    extra = {
        key: value
        for key, value in (("tools", options.tools), ("response_format", options.response_format))
        if value is not None
    }
    if not extra:
        return messages
    first = messages[0]
    if isinstance(first, dict) and first.get("role") == "system":
        return [first | extra, *messages[1:]]
    return [{"role": "system", "content": "", **extra}, *messages]


def _schemas(messages: Sequence[Any]) -> dict[str, Schema]:
    functions = [f for m in messages for f in read_tools(m.get("tools"), "tools")]
    return {f["name"]: f["parameters"] for f in functions if isinstance(f.get("parameters"), Mapping)}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _leaves_reasoning_open(segments: Sequence[Segment]) -> bool:
    own = "".join(segment.text for segment in segments if segment.trusted)
    return own.rfind(THINK) > own.rfind(END_THINK)
