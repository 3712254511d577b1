"""Writing an answer to a terminal or a pipe while it comes, and taking text from one.

Text from a model is not trusted with the terminal: there, control characters show as symbols and do nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, TextIO

from services.cli.conversation import Answer
from services.cli.tools import call_text
from shared.protocol.messages import TextChunk

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_SYMBOLS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_SYMBOLS |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def harmless(text: str) -> str:
    """The text with control characters other than newline and tab made visible."""
    return text.translate(_SYMBOLS)


def well_formed(text: str) -> str:
    """What was typed, with the replacement character where its bytes were no UTF-8: Python has lone surrogates there,
    which can neither be sent nor saved."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


class TextWriter(Protocol):
    """Where the text of an answer goes."""

    def write(self, text: str) -> None: ...

    def end(self) -> None:
        """The answer is complete or broke off: what comes next begins a line. May be called again."""


class PlainWriter:
    """Characters as they come, harmless ones on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._at_line_start = True

    def write(self, text: str) -> None:
        self._out.write(harmless(text) if self._is_terminal else text)
        self._out.flush()
        self._at_line_start = text.endswith("\n")

    def end(self) -> None:
        if not self._at_line_start:
            self.write("\n")


def text_writer(out: TextIO, *, plain: bool) -> TextWriter:
    """Markdown on a terminal that can show it, unless `plain`; the text itself otherwise."""
    if not plain and out.isatty():
        from rich.console import Console

        from services.cli.markdown import MarkdownWriter

        console = Console(file=out, highlight=False)
        if not console.is_dumb_terminal:
            return MarkdownWriter(console)
    return PlainWriter(out)


@dataclass(slots=True)
class AnswerPrinter:
    """Shows the chunks of one answer and collects them in `answer`.

    Text goes to `writer`; reasoning to `out`, dim, if that is a terminal, and else as it is to `aside`.
    """

    out: TextIO
    aside: TextIO
    writer: TextWriter
    answer: Answer
    _is_reasoning: bool = False

    def chunk(self, chunk: TextChunk) -> None:
        self.answer.add(chunk.text, chunk.reasoning, chunk.tool_calls_json)
        if chunk.reasoning:
            self._reasoning(chunk.reasoning)
        if chunk.text:
            self._end_reasoning("\n\n")
            self.writer.write(chunk.text)
        if chunk.finish_reason:
            self.end()
            for call in self.answer.tool_calls:
                text = call_text(call)
                print(f"-> {harmless(text) if self.out.isatty() else text}", file=self.out, flush=True)

    def end(self) -> None:
        """What comes next begins a line, also after an answer that broke off."""
        self._end_reasoning("\n")
        self.writer.end()

    def _reasoning(self, text: str) -> None:
        if not self.out.isatty():
            print(text, end="", file=self.aside, flush=True)
            return
        print(("" if self._is_reasoning else _DIM) + harmless(text), end="", file=self.out, flush=True)
        self._is_reasoning = True

    def _end_reasoning(self, gap: str) -> None:
        if self._is_reasoning:
            print(_PLAIN + gap, end="", file=self.out, flush=True)
            self._is_reasoning = False
