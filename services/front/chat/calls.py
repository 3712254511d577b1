"""A block of tool calls while it is being written.

Gives each call when it is closed, and says when the block is. Forgives missing closing tags where the next tag makes
the meaning plain; a call that is cut off is dropped, for half a call is nothing that anyone should run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto

from services.front.chat.dsml import CompletedCall, Parameter, Schema, arguments_json, read_name, read_parameter
from services.front.chat.format import DSML, EOS
from services.front.chat.marks import Marks

OPENING = f"<{DSML}"
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
_READ_WHOLE = (_State.HEAD, _State.VALUE, _State.TAG)


class CallBlock:
    """Feed it everything from the opening tag on; `rest` is what came after the block once it is `closed`."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas
        self._state = _State.OUTSIDE
        self._span: list[str] = []
        self._raw: list[str] | None = []
        self._calls: list[CompletedCall] = []
        self._name: str | None = None
        self._parameters: dict[str, Parameter] = {}
        self._in_call = False
        self.rest = ""

    @property
    def closed(self) -> bool:
        return self._state is _State.CLOSED

    @property
    def plain_text(self) -> str:
        """What the block says if no call begins in it and it is more than tags: then it was text after all."""
        if self._raw is None:
            return ""
        raw = "".join(self._raw)
        if self.closed:
            raw = raw[: len(raw) - len(self.rest)]
        return raw if _TAG.sub("", raw).strip() else ""

    def feed(self, text: str) -> tuple[CompletedCall, ...]:
        """The calls that this piece closed."""
        if self._raw is not None:
            self._raw.append(text)
        self.rest += text
        while self._advance():
            pass
        calls = tuple(self._calls)
        self._calls.clear()
        return calls

    def _advance(self) -> bool:
        if self.closed:
            return False
        marks = _MARKS[self._state]
        found = marks.find(self.rest)
        cut = marks.settled(self.rest) if found is None else found.start()
        if self._state in _READ_WHOLE:
            self._span.append(self.rest[:cut])
        if found is None:
            self.rest = self.rest[cut:]
            return False
        self.rest = self.rest[found.end() :]
        self._on_mark(found[0])
        return True

    def _on_mark(self, mark: str) -> None:
        span = "".join(self._span)
        self._span.clear()
        if self._state is _State.TAG:
            self._on_closing_tag(span)
        elif self._state is _State.VALUE:
            self._on_value(span, mark)
        elif self._state is _State.HEAD:
            self._name = read_name(span)
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
        self._raw, self._in_call, self._state = None, True, _State.HEAD

    def _close_call(self) -> None:
        if self._in_call and self._name is not None:
            arguments = arguments_json(self._parameters, self._schemas.get(self._name))
            self._calls.append(CompletedCall(self._name, arguments))
        self._in_call, self._name = False, None
        self._parameters = {}

    def _on_value(self, inside: str, mark: str) -> None:
        parameter = read_parameter(inside)
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
