"""What a person sees while services read: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import pytest

from services.cli.progress import counter, loading_bars
from shared.protocol.messages import Pong

GIB = 1 << 30


def pong(service: str, state: str, detail: str = "", done: int = 0, total: int = 0) -> Pong:
    return Pong(service, "b", state, detail, 1, 1.0, done, total)


LAYER = pong("worker", "starting", "weights: layer 3 of 43", 2 * GIB, 8 * GIB)
WAITING = pong("worker", "starting", "waiting for [expertd]")
FRONT = pong("front", "ready")


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_bars() as show:
        show([LAYER, FRONT], [LAYER, FRONT])
        show([LAYER, FRONT], [])
        show([WAITING, FRONT], [WAITING])
    written = capsys.readouterr().err
    assert written.splitlines() == [
        "worker: starting, weights: layer 3 of 43",
        "front: ready",
        "worker: starting, waiting for [expertd]",
    ]


def test_a_bar_with_bytes_and_time_left_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with loading_bars() as show:
        show([LAYER, FRONT], [LAYER, FRONT])
    written = capsys.readouterr().err
    assert "front: ready" in written
    assert "weights: layer 3 of 43" in written
    assert "2.0/8.0 GiB" in written
    assert "-:--:--" in written, "the time left, not known yet"


def test_a_bar_ends_with_what_it_was_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with loading_bars() as show:
        show([LAYER], [LAYER])
        show([WAITING], [WAITING])
        capsys.readouterr()
    assert "GiB" not in capsys.readouterr().err


def test_a_count_on_a_terminal_and_what_is_printed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is no terminal here, so it keeps what is its own."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with counter("asking", 200) as done:
        for _ in range(37):
            done()
        print("wrong")
    written = capsys.readouterr()
    assert " 37 of 200" in written.err.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert written.out == "wrong\n"


def test_no_count_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with counter("asking", 2) as done:
        done()
    assert capsys.readouterr().err == ""
