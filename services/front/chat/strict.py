"""The vendor's strict reading of a whole completion: the format to the letter, or an error.

The answers that people get come from the tolerant parser; this one says whether a model still keeps to its format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.front.chat.arguments import joined, quoted
from services.front.chat.dsml import CompletedCall
from services.front.chat.format import BOS, DSML, END_THINK, EOS, THINK

_CALLS = f"\n\n<{DSML}tool_calls"
_INVOKE, _END_INVOKE, _END_CALLS = f"<{DSML}invoke", f"</{DSML}invoke", f"</{DSML}tool_calls>"
_PARAMETER, _END_PARAMETER = f"<{DSML}parameter", f"/{DSML}parameter"
_NAME = re.compile(r'\s*name="(.*?)">\n\n?', re.DOTALL)
_ARGUMENT = re.compile(r' name="(.*?)" string="(true|false)">(.*?)<', re.DOTALL)


class MalformedCompletion(ValueError):
    """The completion breaks the format; the message says where."""


@dataclass(frozen=True, slots=True)
class Completion:
    content: str
    reasoning: str
    calls: tuple[CompletedCall, ...]


def parse_strict(text: str, *, thinking: bool) -> Completion:
    """Read a completion that must be well formed from its first letter to the end mark.

    The end mark may be missing after tool calls. Values of parameters are copied unchanged, so arguments need not be
    valid JSON.

    Raises:
        MalformedCompletion: it is not.
    """
    reader = _Reader(text)
    reasoning = reader.until(END_THINK, forbidden=_CALLS) if thinking else ""
    content, mark = reader.until_any(EOS, _CALLS)
    calls = _read_calls(reader) if mark == _CALLS else ()
    if mark == _CALLS and not reader.exhausted:
        _demand(reader.until(EOS) == "", "text after the tool calls")
    _demand(reader.exhausted, "text after the end mark")
    for token in (BOS, EOS, THINK, END_THINK, DSML):
        _demand(token not in content and token not in reasoning, f"{token} in the middle of the answer")
    return Completion(content, reasoning, calls)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def exhausted(self) -> bool:
        return self._at == len(self._text)

    def until_any(self, *marks: str) -> tuple[str, str]:
        """The text before the first of the marks, and that mark; the reader is behind it then."""
        places = {self._text.find(mark, self._at): mark for mark in marks}
        places.pop(-1, None)
        _demand(bool(places), f"none of {', '.join(map(repr, marks))} follows")
        place = min(places)
        before = self._text[self._at : place]
        self._at = place + len(places[place])
        return before, places[place]

    def until(self, mark: str, forbidden: str | None = None) -> str:
        before, found = self.until_any(mark, *([forbidden] if forbidden else []))
        _demand(found == mark, f"{found!r} comes before {mark!r}")
        return before


def _read_calls(reader: _Reader) -> tuple[CompletedCall, ...]:
    calls: list[CompletedCall] = []
    while True:
        before, mark = reader.until_any(_INVOKE, _END_CALLS)
        _demand(before == ">\n", "a call does not follow on a line of its own")
        if mark == _END_CALLS:
            return tuple(calls)
        calls.append(_read_call(reader))


def _read_call(reader: _Reader) -> CompletedCall:
    head, mark = reader.until_any(_PARAMETER, _END_INVOKE)
    name = _match(_NAME, head, "a call without a readable name")[1]
    arguments: dict[str, str] = {}
    while mark == _PARAMETER:
        inside = reader.until(_END_PARAMETER)
        # First, because a pattern that cannot end tries every place where it could.
        _demand(inside.endswith("<"), "a closing tag without its <")
        match = _match(_ARGUMENT, inside, "a parameter without readable name, string and value")
        _demand(match[1] not in arguments, f"the parameter {match[1]!r} comes twice")
        arguments[match[1]] = quoted(match[3]) if match[2] == "true" else match[3]
        between, mark = reader.until_any(_PARAMETER, _END_INVOKE)
        _demand(between == ">\n", "a parameter does not end its line")
    return CompletedCall(name, joined(arguments))


def _match(pattern: re.Pattern[str], text: str, complaint: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise MalformedCompletion(complaint)
    return match


def _demand(ok: bool, complaint: str) -> None:
    if not ok:
        raise MalformedCompletion(complaint)
