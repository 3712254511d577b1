"""Keeps CPUs from going to sleep, to see what their waking up costs.

A thread that waits for another's message, for a drive or for a lock gives its CPU up, which then sleeps; in a virtual
machine the host takes it away meanwhile. Here a process of the lowest class runs on every CPU while nobody else does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import os
os.sched_setaffinity(0, [{cpu}])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == {parent}:
    for _ in range(100_000):
        pass
"""


class Spinners:
    """One process for each of these CPUs; they stand still at first, and end with this one at the latest."""

    def __init__(self, cpus: set[int]) -> None:
        parent = os.getpid()
        commands = ([sys.executable, "-c", _SPIN.format(cpu=cpu, parent=parent)] for cpu in sorted(cpus))
        self._processes = [subprocess.Popen(command) for command in commands]
        self._signal(signal.SIGSTOP)

    @contextmanager
    def running(self, wanted: bool) -> Iterator[None]:
        """No CPU sleeps inside the block, if that is wanted."""
        if not wanted:
            yield
            return
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)
