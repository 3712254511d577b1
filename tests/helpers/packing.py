"""Packing that is killed in the middle, and what is to be the same in the end."""

from __future__ import annotations

import filecmp
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

JOURNAL_BYTES = 60_000  # about two records of the tiny checkpoint
Progress = Callable[[int, int], None]


def assert_same_tree(left: Path, right: Path) -> None:
    names = {path.relative_to(left) for path in left.rglob("*")}
    assert names == {path.relative_to(right) for path in right.rglob("*")}
    for name in names:
        if (left / name).is_file():
            assert filecmp.cmp(left / name, right / name, shallow=False), name


def run_and_die(work: Callable[[], object], after_s: float | None = None) -> bool:
    """Run in a forked child; SIGKILL it after a while. True if it was killed (by us or by itself)."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(3)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "packing raised"
    return os.WIFSIGNALED(status)


def killer(at: int) -> Progress:
    def progress(done: int, total: int) -> None:
        if done >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    return progress
