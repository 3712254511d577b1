"""Running `icebox` as a person would: as a process, on a pipe or on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Makes the pseudo-terminal the controlling one, so that Ctrl-C typed into it becomes a signal.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "services.cli", *sys.argv[1:]])
"""


def icebox(*arguments: str, config: Path | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "services.cli", *arguments, *(["--config", str(config)] if config else [])]
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env=environment, stdin=subprocess.DEVNULL
    )


class Terminal:
    """A program on a pseudo-terminal of 200 columns: type into it, and wait for what it shows."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self.shown = ""
        self._seen = 0

    def type(self, text: str | bytes) -> None:
        os.write(self._descriptor, text.encode() if isinstance(text, str) else text)

    def expect(self, pattern: str, timeout_s: float = 20.0) -> str:
        """Wait until something new matches; what has been shown since the last match."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.shown[self._seen :])):
            assert time.monotonic() < deadline, f"{pattern!r} not shown; there is {self.shown[self._seen :][-2000:]!r}"
            self._read(deadline)
        text = self.shown[self._seen : self._seen + match.end()]
        self._seen += match.end()
        return text

    def ends(self, timeout_s: float = 20.0) -> int:
        """Read what is left and return the exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(min(deadline, time.monotonic() + 0.05))
        return self.process.wait(1.0)

    def _read(self, deadline: float) -> None:
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if ready:
            with contextlib.suppress(OSError):  # the other side has closed
                self.shown += os.read(self._descriptor, 65536).decode(errors="replace")


@contextmanager
def on_terminal(*arguments: str) -> Iterator[Terminal]:
    """`icebox` with these arguments on a terminal of its own; killed at the end if it is still there.

    What it keeps for its user is kept in `$XDG_STATE_HOME` if that is set, else in a folder that goes with the block.
    """
    with tempfile.TemporaryDirectory() as folder:
        state = {"XDG_STATE_HOME": folder} | os.environ
        with _on_terminal(arguments, {**state, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}) as terminal:
            yield terminal


@contextmanager
def _on_terminal(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, *arguments],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=environment,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
