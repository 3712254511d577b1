"""Markdown that grows: nothing is lost, nothing changes after it was printed, and no text takes over the terminal."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from services.cli import markdown as markdown_module
from services.cli.markdown import MarkdownWriter, markdown, split_finished

PIECES = (
    "word ",
    "\n",
    "\n\n",
    "# ",
    "- ",
    "1. ",
    "> ",
    "```",
    "~~~py\n",
    "**",
    "`",
    "|",
    "--|--",
    "    ",
    "---",
    "\x85",
)
texts = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def blocks(source):
    return [(t.type, t.content) for t in MarkdownIt("commonmark", {"html": False}).enable("table").parse(source)]


@settings(deadline=None)
@given(texts, st.integers(1, 7))
def test_what_is_finished_stays_as_it_is(source, step):
    source += "\n"
    printed, growing = [], ""
    for i in range(0, len(source), step):
        finished, growing = split_finished(growing + source[i : i + step])
        printed += [finished] if finished else []
    parts = [*printed, growing]
    assert "".join(parts) == source
    assert [token for part in parts for token in blocks(part)] == blocks(source)


def test_a_block_is_finished_when_the_next_one_begins():
    assert split_finished("one\n") == ("", "one\n")
    assert split_finished("one\n\ntw") == ("", "one\n\ntw")
    assert split_finished("one\n\ntwo\n") == ("one\n\n", "two\n")
    assert split_finished("```\n# no\n\nheading\n") == ("", "```\n# no\n\nheading\n")
    assert split_finished("para\n#") == ("", "para\n#")


def shown(source, **options):
    console = Console(file=io.StringIO(), width=60, **options)
    console.print(markdown(source))
    return console.file.getvalue()


def lines(text):
    return [line.rstrip() for line in text.split("\n") if line.strip()]


@settings(deadline=None)  # rich imports what it needs when it first needs it
@given(st.one_of(texts, st.text()))
def test_any_text_can_be_shown(source):
    shown(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("one\ntwo", "one\ntwo"),
        ("<div>kept</div>", "<div>kept</div>"),
        ("a <b>kept</b>", "a <b>kept</b>"),
        ("[here](https://example.org/x)", "here (https://example.org/x)"),
        ("**bold** `code`", "bold code"),
        ("[bold]not rich's own markup[/bold] :cat:", "[bold]not rich's own markup[/bold] :cat:"),
    ],
)
def test_nothing_that_was_said_is_lost(source, expected):
    assert lines(shown(source)) == expected.split("\n")


@settings(deadline=None)
@given(st.text(st.sampled_from("\x1b]8;\x07\x9b[2J`\n#&27 a"), max_size=40))
def test_no_text_takes_over_the_terminal(text):
    out = io.StringIO()
    writer = MarkdownWriter(Console(file=out, force_terminal=True, width=60, height=20, color_system=None))
    writer.write(text)
    writer.end()
    allowed = {"\x1b[1A", "\x1b[2K", "\x1b[?25l", "\x1b[?25h"}
    left = ESCAPE.sub(lambda match: "" if match[0] in allowed else match[0], out.getvalue())
    assert not [c for c in left if (ord(c) < 0x20 and c not in "\n\r") or 0x7F <= ord(c) < 0xA0]


def on_screen(written, height):
    """What a terminal shows after these bytes: it knows line feeds, and how to go up and to erase a line."""
    screen, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            screen += [""] * (row == len(screen))
        elif part == "\x1b[1A":
            row -= 1
            assert row >= len(screen) - height, "what has scrolled off cannot be reached"
        elif part == "\x1b[2K":
            screen[row] = ""
        elif part[0] not in "\x1b\r":
            screen[row] += part
    return [line.rstrip() for line in screen]


@pytest.mark.parametrize("height", [4, 40])
def test_a_growing_answer_ends_as_the_whole_one(height, monkeypatch):
    monkeypatch.setattr(markdown_module, "INTERVAL_S", 0.0)
    monkeypatch.setattr(markdown_module, "DRAWING_SHARE", 1e9)
    blocks = ["# Title", "text **bold** of\nlines", "- a\n- b", "```py\nprint(1)\n\n" + "print(2)\n" * 9 + "```", "end"]
    out = io.StringIO()
    writer = MarkdownWriter(Console(file=out, force_terminal=True, color_system=None, width=60, height=height))
    for character in "\n\n".join(blocks):
        writer.write(character)
    writer.end()
    writer.end()
    assert out.getvalue().count("\x1b[2K") > 50, "it was drawn while it grew"
    expected = "\n".join(shown(block) for block in blocks)
    assert on_screen(out.getvalue(), height) == [line.rstrip() for line in expected.split("\n")]
