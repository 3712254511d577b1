"""Markdown on a terminal while it is being written.

A block (paragraph, list, code, table) is shown again and again while it grows; once the next one begins it can change
no more and is printed for good, so that scrolling back shows the whole answer.
"""

from __future__ import annotations

import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from services.cli.terminal import harmless

# The least time between two pictures of a growing block, in seconds, and the share of the time that drawing may take.
INTERVAL_S = 0.05
DRAWING_SHARE = 0.1

# HTML is text here: a terminal can do nothing with it, and leaving it out would lose what the model said.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_BLOCKS = MarkdownIt("commonmark", {"html": False}).enable("table").disable("inline")


def split_finished(source: str) -> tuple[str, str]:
    """The blocks that more text cannot change, and the rest. Joined they are `source`."""
    complete = source[: source.rfind("\n") + 1]
    starts = [token.map[0] for token in _BLOCKS.parse(complete) if token.level == 0 and token.map]
    if len(starts) < 2:
        return "", source
    finished = "".join(line + "\n" for line in complete.split("\n")[: starts[-1]])
    return finished, source[len(finished) :]


def markdown(source: str) -> Markdown:
    """What rich shows for this source. Line breaks stay, and the target of a link is visible before it is followed."""
    made = Markdown("", hyperlinks=False)
    made.parsed = _PARSER.parse(source)
    for token in made.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return made


class _Tail:
    """As many last lines of a growing block as the screen holds: what scrolled off cannot be drawn again."""

    def __init__(self, source: str, *, has_gap: bool) -> None:
        """`has_gap` puts an empty line in front."""
        self._source = source
        self._has_gap = has_gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(markdown(self._source), options.update(height=None), pad=False)
        if self._has_gap:
            lines.insert(0, [])
        for line in lines[-(console.height - 1) :]:
            yield from line
            yield Segment.line()


class MarkdownWriter:
    """A TextWriter for one answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._growing = ""
        self._has_printed = False
        self._live: Live | None = None
        self._next_draw = 0.0

    def write(self, text: str) -> None:
        self._growing += harmless(text)
        if "\n" in text:
            finished, self._growing = split_finished(self._growing)
            if finished:
                self._print(finished)
        if time.monotonic() >= self._next_draw:
            self._draw()

    def end(self) -> None:
        growing, self._growing = self._growing, ""
        self._print(growing)

    def _print(self, source: str) -> None:
        self._undraw()
        if source.strip():
            if self._has_printed:
                self._console.print()
            self._console.print(markdown(source))
            self._has_printed = True

    def _draw(self) -> None:
        began = time.monotonic()
        if self._live is None:
            self._live = Live(
                console=self._console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="visible",
            )
            self._live.start()
        self._live.update(_Tail(self._growing, has_gap=self._has_printed), refresh=True)
        now = time.monotonic()
        self._next_draw = now + max(INTERVAL_S, (now - began) / DRAWING_SHARE)

    def _undraw(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
