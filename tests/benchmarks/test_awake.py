"""CPUs are kept busy when that is wanted, and only then."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

from benchmarks.awake import Spinners


def cpu_ticks(pid: int) -> int:
    """Clock ticks that a process has computed for (proc(5): utime)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_spinners_run_while_it_is_wanted() -> None:
    before = children()
    with closing(Spinners({min(os.sched_getaffinity(0))})) as spinners:
        (pid,) = children() - before
        with spinners.running(False):
            time.sleep(0.2)
        assert cpu_ticks(pid) == 0
        with spinners.running(True):
            started = time.monotonic()
            while cpu_ticks(pid) < 10:
                assert time.monotonic() < started + 30, "it does not compute"
                time.sleep(0.05)
            assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        time.sleep(0.05)
        stopped = cpu_ticks(pid)
        time.sleep(0.3)
        assert cpu_ticks(pid) == stopped
    assert children() == before
