"""From a request to what the worker is asked: checked, rendered, counted.

Pure: takes text apart and puts it together, and knows no socket. Whatever is wrong with a request is a bad_request
that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.front.chat.dsml import Schema
from services.front.chat.encoding import ChatOptions, Segment, ThinkingMode, encode_chat
from services.front.chat.format import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    ESSENTIAL_TOKENS,
    THINK,
    USER,
    ChatFormat,
)
from services.front.chat.messages import ChatError, read_tools
from services.front.effort import effort_level
from services.front.generation import ANY_FUNCTION, Conversation, GenerationRequest, RawPrompt, Sampling
from services.front.tokenizer import Tokenizer
from shared.errors import CheckpointError, ErrorCode, ServiceError
from shared.protocol.messages import Generate

_ANY_LENGTH = 2**63


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request ready for the worker.

    `thinking` says that the prompt leaves the reasoning part open; `opening` is the beginning of the answer that it
    has already written. `schemas` are the parameter schemas of the offered functions, by name.
    """

    request: GenerationRequest
    generate: Generate
    thinking: bool = False
    opening: str = ""
    schemas: Mapping[str, Schema] = field(default_factory=dict)


class PromptMaker:
    """Makes prompts for one checkpoint."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        max_context: int,
        default_max_tokens: int,
        *,
        trust_control_tokens: bool = False,
    ) -> None:
        """With `trust_control_tokens` those in messages count, as the vendor's encoder has it.

        Raises CheckpointError if the tokenizer lacks a control token that every turn needs.
        """
        missing = [token for token in ESSENTIAL_TOKENS if tokenizer.control_id(token) is None]
        if missing:
            raise CheckpointError(f"tokenizer.json lacks the added tokens {' '.join(missing)} of the chat format")
        self._tokenizer = tokenizer
        self._format = chat_format
        self._max_context = max_context
        self._default_max_tokens = default_max_tokens
        self._trusts = trust_control_tokens
        self._stop_ids = tuple(i for i in [tokenizer.control_id(EOS)] if i is not None)

    def without_limit(self) -> PromptMaker:
        """The same for prompts of any length, to count their tokens."""
        return PromptMaker(
            self._tokenizer,
            self._format,
            _ANY_LENGTH,
            self._default_max_tokens,
            trust_control_tokens=self._trusts,
        )

    def make(self, request: GenerationRequest) -> Prompt:
        """Check and render a request. `max_tokens` 0 asks for the default; an answer never outgrows the context.

        Raises:
            ServiceError: bad_request, naming the field or the numbers that do not fit.
        """
        try:
            if isinstance(request.prompt, RawPrompt):
                return Prompt(request, self._generate(request.sampling, self._raw_ids(request.prompt)))
            return self._chat_prompt(request, request.prompt)
        except ChatError as error:
            raise ServiceError(ErrorCode.BAD_REQUEST, str(error)) from None
        except RecursionError:
            raise ServiceError(ErrorCode.BAD_REQUEST, "the request is nested too deeply") from None

    def _chat_prompt(self, request: GenerationRequest, chat: Conversation) -> Prompt:
        messages = [_joined(m, f"messages[{i}]") for i, m in enumerate(chat.messages)]
        if not messages:
            raise ChatError("messages must have at least one message")
        _check_asks(messages[-1])
        messages = _with_instructions(messages, chat)
        segments = self._render(messages, chat)
        thinking = _leaves_reasoning_open(segments)
        opening = [] if chat.forced_call is None else _call_opening(chat.forced_call, chat.tools)
        if opening and thinking:
            thinking = False
            segments.append(Segment(END_THINK, trusted=True))
        ids = self._encode([*segments, *opening])
        generate = self._generate(request.sampling, ids)
        return Prompt(request, generate, thinking, "".join(s.text for s in opening), _schemas(messages))

    def _render(self, messages: Sequence[Any], chat: Conversation) -> list[Segment]:
        mode = ThinkingMode.THINKING if chat.thinking else ThinkingMode.CHAT
        effort = effort_level(chat.effort, self._format.efforts)
        options = ChatOptions(mode, drop_thinking=chat.drop_thinking, effort=effort)
        return encode_chat(messages, self._format, options)

    def _raw_ids(self, prompt: RawPrompt) -> tuple[int, ...]:
        if not isinstance(prompt.content, str):
            return prompt.content
        bos = "" if prompt.content.startswith(BOS) else BOS
        return self._encode([Segment(bos + prompt.content, trusted=True)])

    def _encode(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        if not all(_is_unicode(segment.text) for segment in segments):
            raise ChatError("the request contains half a surrogate pair, which is no character")
        self._check_length(sum(len(s.text) for s in segments) // self._tokenizer.longest, "at least ")
        return tuple(self._tokenizer.encode((s.text, s.trusted or self._trusts) for s in segments))

    def _check_length(self, num_tokens: int, at_least: str = "") -> None:
        """Called twice, so that a text that cannot fit is not taken apart first."""
        if num_tokens >= self._max_context:
            raise ChatError(
                f"the prompt has {at_least}{num_tokens} tokens, but model.max_context = {self._max_context} leaves "
                f"room for {self._max_context - 1} and one of answer; shorten it or raise model.max_context"
            )

    def _generate(self, sampling: Sampling, ids: tuple[int, ...]) -> Generate:
        self._check_length(len(ids))
        if sampling.max_tokens < 0:
            raise ChatError(f"max_tokens must be at least 1, not {sampling.max_tokens}")
        return Generate(
            prompt_ids=ids,
            max_tokens=min(sampling.max_tokens or self._default_max_tokens, self._max_context - len(ids)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_ids=self._stop_ids,
            top_logprobs=sampling.top_logprobs,
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


def _check_asks(last: Any) -> None:
    """A prompt that ends with instructions or behind an answer hands over to nobody: what follows would be noise."""
    is_over = isinstance(last, dict) and last.get("role") in ("system", "assistant")
    if is_over and not (last.get("wo_eos") or last.get("task")):
        raise ChatError(
            "messages must end with what the model should answer: a message of user or tool, or one of the assistant "
            "that has prefix: true and is continued"
        )


def _with_instructions(messages: list[Any], chat: Conversation) -> list[Any]:
    """Tools and schema of the request go to the system message, which is made if there is none."""
    extra: dict[str, Any] = {"tools": list(chat.tools)} if chat.tools else {}
    if chat.json_schema is not None:
        extra["response_format"] = chat.json_schema
    if not extra:
        return messages
    first = messages[0]
    if isinstance(first, dict) and first.get("role") == "system":
        return [first | extra, *messages[1:]]
    return [{"role": "system", "content": "", **extra}, *messages]


def _call_opening(forced_call: str, tools: Sequence[Any]) -> list[Segment]:
    """The beginning of a call that the model cannot but finish."""
    names = [function["name"] for function in read_tools(list(tools), "tools")]
    own = [Segment(f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="', trusted=True)]
    if not names:
        raise ChatError("tool_choice asks for a call, but there are no tools")
    if forced_call == ANY_FUNCTION:
        return own
    if forced_call not in names:
        raise ChatError(f"tool_choice names {forced_call!r}, which is not one of the tools: {', '.join(names)}")
    return [*own, Segment(forced_call, trusted=False), Segment('">\n', trusted=True)]


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
