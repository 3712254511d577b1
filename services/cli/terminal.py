"""Writing an answer to a terminal or a pipe while it comes.

Text from a model is not trusted with the terminal: there, control characters show as symbols and do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from services.cli.conversation import Answer
from shared.protocol.messages import TextChunk

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_SYMBOLS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_SYMBOLS |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def harmless(text: str) -> str:
    """The text with control characters other than newline and tab made visible."""
    return text.translate(_SYMBOLS)


@dataclass(slots=True)
class AnswerPrinter:
    """Prints chunks to `out`, reasoning dim on a terminal and to `aside` otherwise; collects them in `answer`."""

    out: TextIO
    aside: TextIO
    answer: Answer
    _dims: bool = False
    _at_line_start: bool = True

    def chunk(self, chunk: TextChunk) -> None:
        self.answer.add(chunk.text, chunk.reasoning, chunk.tool_calls_json)
        if chunk.reasoning:
            self._reasoning(chunk.reasoning)
        if chunk.text:
            self._text(chunk.text)
        if chunk.finish_reason:
            self._end(chunk)

    def _reasoning(self, text: str) -> None:
        if not self.out.isatty():
            print(text, end="", file=self.aside, flush=True)
            return
        self._write(("" if self._dims else _DIM) + harmless(text))
        self._dims = True

    def _text(self, text: str) -> None:
        if self._dims:
            self._write(_PLAIN + "\n\n")
            self._dims = False
        self._write(harmless(text) if self.out.isatty() else text)

    def _end(self, chunk: TextChunk) -> None:
        if self._dims:
            self._write(_PLAIN)
        self.break_line()
        if chunk.tool_calls_json:
            self._write(f"tool calls: {harmless(chunk.tool_calls_json)}\n")

    def break_line(self) -> None:
        """What comes next begins a line, also after an answer that broke off."""
        if not self._at_line_start:
            self._write("\n")

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        self._at_line_start = text.endswith("\n")
