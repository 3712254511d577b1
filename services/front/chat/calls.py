"""A block of tool calls while it is being written.

Tells of a call as soon as its name is known, then of its arguments piece by piece, then that it is complete; and says
when the block is closed. Forgives missing closing tags where the next tag makes the meaning plain. A call that is cut
off never becomes complete, for half a call is nothing that anyone should run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto

from services.front.chat.arguments import ArgumentsWriter, arguments_json
from services.front.chat.dsml import (
    ArgumentsPiece,
    CallBegun,
    CallEvent,
    CompletedCall,
    Parameter,
    Schema,
    read_name,
    read_parameter,
)
from services.front.chat.format import DSML, EOS
from services.front.chat.marks import Marks

OPENING = f"<{DSML}"
# A tag is read before the text behind it has ended only if it is not longer than this, so that looking for its end
# costs no more for a tag that has none.
_LONGEST_TAG = 1_000
_INVOKE, _PARAMETER, _CLOSE = f"<{DSML}invoke", f"<{DSML}parameter", f"</{DSML}"
_TAG = re.compile(rf"</?{DSML}\w*>?|</?{''.join(f'{c}?' for c in DSML)}$")


class _State(Enum):
    OUTSIDE = auto()
    HEAD = auto()  # of a call: its name
    INSIDE = auto()  # a call, between parameters
    VALUE = auto()  # a parameter, its attributes included
    TAG = auto()  # a closing tag whose name is still to come
    CLOSED = auto()


_IN_CALL = Marks.of([_PARAMETER, _INVOKE, _CLOSE, EOS])
_MARKS = {
    _State.OUTSIDE: Marks.of([_INVOKE, _CLOSE, EOS]),
    _State.HEAD: _IN_CALL,
    _State.INSIDE: _IN_CALL,
    _State.VALUE: Marks.of([f"{_CLOSE}parameter", f"{_CLOSE}invoke"]),
    _State.TAG: Marks.of([">", EOS]),
}
_SPANS = (_State.HEAD, _State.VALUE, _State.TAG)


class CallBlock:
    """Feed it everything from the opening tag on; `rest` is what came after the block once it is `closed`."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas
        self._state = _State.OUTSIDE
        self._span: list[str] = []
        self._span_length = 0
        self._raw: list[str] | None = []
        self._events: list[CallEvent] = []
        self._name: str | None = None
        self._parameters: dict[str, Parameter] = {}
        self._writer = ArgumentsWriter(None)
        self._text: Parameter | None = None  # whose value is written while it comes
        self._in_call = False
        self.rest = ""

    @property
    def closed(self) -> bool:
        return self._state is _State.CLOSED

    @property
    def plain_text(self) -> str:
        """What the block says if no call in it has a name and it is more than tags: then it was text after all.

        Nothing while a call is open, whose name may have been cut off.
        """
        if self._raw is None or (self._in_call and not self.closed):
            return ""
        raw = "".join(self._raw)
        if self.closed:
            raw = raw[: len(raw) - len(self.rest)]
        return raw if _TAG.sub("", raw).strip() else ""

    def feed(self, text: str) -> tuple[CallEvent, ...]:
        """What this piece says of calls."""
        if self._raw is not None:
            self._raw.append(text)
        self.rest += text
        while self._advance():
            pass
        events = tuple(self._events)
        self._events.clear()
        return events

    def _advance(self) -> bool:
        if self.closed:
            return False
        marks = _MARKS[self._state]
        found = marks.find(self.rest)
        cut = marks.settled(self.rest) if found is None else found.start()
        if self._state in _SPANS:
            self._add(self.rest[:cut])
        if found is None:
            self.rest = self.rest[cut:]
            return False
        self.rest = self.rest[found.end() :]
        self._on_mark(found[0])
        return True

    def _add(self, text: str) -> None:
        """More of the span, which says something before its end if a tag in it is complete."""
        may_end_tag = ">" in text and self._span_length < _LONGEST_TAG
        self._span.append(text)
        self._span_length += len(text)
        if self._text is not None:
            self._write(self._writer.text(text))
        elif may_end_tag and self._state is _State.HEAD:
            self._begin_call(read_name("".join(self._span), _LONGEST_TAG))
        elif may_end_tag and self._state is _State.VALUE:
            self._begin_text(read_parameter("".join(self._span), _LONGEST_TAG))

    def _take_span(self) -> str:
        span = "".join(self._span)
        self._span.clear()
        self._span_length = 0
        return span

    def _on_mark(self, mark: str) -> None:
        span = self._take_span()
        if self._state is _State.TAG:
            self._on_closing_tag(span)
        elif self._state is _State.VALUE:
            self._on_value(span, mark)
        elif self._state is _State.HEAD:
            self._begin_call(read_name(span))
        if mark == EOS:
            self._state, self.rest = _State.CLOSED, EOS + self.rest
        elif mark == _INVOKE:
            self._open_call()
        elif mark == _PARAMETER:
            self._state = _State.VALUE
        elif mark == _CLOSE:
            self._state = _State.TAG

    def _open_call(self) -> None:
        self._close_call()
        self._in_call, self._state = True, _State.HEAD

    def _begin_call(self, name: str | None) -> None:
        """A call whose name cannot be read is none."""
        if name is not None:
            self._take_span()
            self._raw, self._name, self._state = None, name, _State.INSIDE
            self._writer = ArgumentsWriter(self._schemas.get(name))
            self._events.append(CallBegun(name))

    def _close_call(self) -> None:
        if self._in_call and self._name is not None:
            self._write(self._writer.end())
            arguments = arguments_json(self._parameters, self._schemas.get(self._name))
            self._events.append(CompletedCall(self._name, arguments))
        self._in_call, self._name = False, None
        self._parameters, self._writer = {}, ArgumentsWriter(None)

    def _write(self, arguments: str) -> None:
        """Pieces join, so that what came at once is told at once."""
        if self._name is None or not arguments:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ArgumentsPiece):
            self._events[-1] = ArgumentsPiece(last.text + arguments)
        else:
            self._events.append(ArgumentsPiece(arguments))

    def _begin_text(self, parameter: Parameter | None) -> None:
        if parameter is not None and self._writer.is_text(parameter):
            self._text = parameter
            self._take_span()
            self._span.append(parameter.value)
            self._write(self._writer.open_text(parameter.name) + self._writer.text(parameter.value))

    def _on_value(self, span: str, mark: str) -> None:
        if self._text is not None:
            parameter: Parameter | None = replace(self._text, value=span)
            self._text = None
            self._write(self._writer.close_text())
        else:
            parameter = read_parameter(span)
            if parameter is not None:
                self._write(self._writer.parameter(parameter))
        if parameter is not None:
            self._parameters[parameter.name] = parameter
        self._state = _State.INSIDE
        if mark == f"{_CLOSE}invoke":
            self._close_call()
            self._state = _State.OUTSIDE

    def _on_closing_tag(self, name: str) -> None:
        """`name` may be followed by what a missing ">" let in."""
        if name.startswith("parameter"):
            self._state = _State.INSIDE if self._in_call else _State.OUTSIDE
            return
        self._close_call()
        self._state = _State.OUTSIDE if name.startswith("invoke") else _State.CLOSED
