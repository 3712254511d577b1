"""What a completion says, while it is being written: reasoning, text, tool calls.

Tolerant: whatever the model writes, the parser returns what it understood and never raises, and cutting the text into
other pieces changes nothing. Knows no token ids and no transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from services.front.chat.calls import OPENING, CallBlock
from services.front.chat.dsml import CallEvent, CompletedCall, Schema
from services.front.chat.format import END_THINK, EOS, THINK
from services.front.chat.marks import Marks

# A block opens at the marker token, whatever name follows; the blank line before it belongs to it.
_OPENERS = ("\n\n" + OPENING, "\n" + OPENING, OPENING)


class _State(Enum):
    START = auto()
    REASONING = auto()
    TEXT = auto()
    CALLS = auto()
    DONE = auto()


_MARKS = {
    _State.REASONING: Marks.of([END_THINK, EOS, *_OPENERS]),
    _State.TEXT: Marks.of([EOS, *_OPENERS]),
}


class Delta(NamedTuple):
    """What one piece of text added; `calls` in the order in which the model wrote them, none interleaved."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """The last delta, and why the answer ended: stop, length, abort or tool_calls."""

    delta: Delta
    finish_reason: str


class CompletionParser:
    """Feed it the pieces, then `finish` it once.

    `thinking` says that the prompt left the reasoning part open; `schemas` are the parameter schemas of the functions
    that were offered, by name. `text_start` is how many characters had been fed before the text began, which then has
    no gap.
    """

    def __init__(self, *, thinking: bool, schemas: Mapping[str, Schema] | None = None) -> None:
        self._opening_state = _State.REASONING if thinking else _State.TEXT
        self._schemas = schemas or {}
        self._state = _State.START
        self._tail = ""
        self._num_fed = 0
        self.text_start = 0
        self._said: dict[_State, list[str]] = {_State.REASONING: [], _State.TEXT: []}
        self._calls: list[CallEvent] = []
        self._has_called = False
        self._block = CallBlock(self._schemas)
        self._block_origin = _State.TEXT

    @property
    def finished(self) -> bool:
        """The answer is complete; what the model writes after this is ignored."""
        return self._state is _State.DONE

    @property
    def in_reasoning(self) -> bool:
        """What comes next is reasoning, unless it turns out to be a mark."""
        return (self._opening_state if self._state is _State.START else self._state) is _State.REASONING

    def feed(self, piece: str) -> Delta:
        self._num_fed += len(piece)
        self._tail += piece
        while self._advance():
            pass
        return self._take()

    def finish(self, reason: str) -> Ending:
        """End of the text. `reason` is the generator's: "stop", "length" or "abort"."""
        natural = self.finished or reason == "stop"
        if self._state is _State.START:
            self._state = self._opening_state
        if self._state is _State.CALLS:
            self._state, self._tail = self._block_origin, self._block.plain_text
        if not self.finished:
            self._said[self._state].append(self._tail)
        self._state, self._tail = _State.DONE, ""
        if natural:
            reason = "tool_calls" if self._has_called else "stop"
        return Ending(self._take(), reason)

    def _take(self) -> Delta:
        reasoning, text = self._said.values()
        delta = Delta("".join(reasoning), "".join(text), tuple(self._calls))
        reasoning.clear()
        text.clear()
        self._calls.clear()
        return delta

    def _advance(self) -> bool:
        """One step; False if more text is needed first."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.CALLS:
                return self._follow_calls()
            case _State.DONE:
                self._tail = ""
                return False
        return self._speak()

    def _start(self) -> bool:
        """The prompt says whether reasoning is open; some models open it (again) by themselves."""
        if self._tail.startswith(THINK):
            self._tail, self._state = self._tail.removeprefix(THINK), _State.REASONING
        elif not THINK.startswith(self._tail):
            self._state = self._opening_state
        return self._state is not _State.START

    def _speak(self) -> bool:
        marks, said = _MARKS[self._state], self._said[self._state]
        found = marks.find(self._tail)
        if found is None:
            cut = marks.settled(self._tail)
            said.append(self._tail[:cut])
            self._tail = self._tail[cut:]
            return False
        said.append(self._tail[: found.start()])
        self._tail = self._tail[found.end() :]
        self._on_mark(found[0])
        return True

    def _on_mark(self, mark: str) -> None:
        if mark == EOS:
            self._state = _State.DONE
        elif mark == END_THINK:
            self._state, self.text_start = _State.TEXT, self._num_fed - len(self._tail)
        else:
            self._block, self._block_origin = CallBlock(self._schemas), self._state
            self._tail, self._state = mark + self._tail, _State.CALLS

    def _follow_calls(self) -> bool:
        calls = self._block.feed(self._tail)
        self._tail = ""
        self._calls += calls
        self._has_called = self._has_called or any(isinstance(event, CompletedCall) for event in calls)
        if not self._block.closed:
            return False
        plain = self._block.plain_text
        if plain:
            self._said[self._block_origin].append(plain)
            self._state, self._tail = self._block_origin, self._block.rest
        else:
            self._state = _State.DONE
        return True
