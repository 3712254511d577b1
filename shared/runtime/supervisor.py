"""The processes above a service. honcho does not take its children along when it is killed; this is how they notice."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.config import under_honcho
from shared.errors import PeerLost

INIT_PID = 1


@contextmanager
def watched_honcho() -> Iterator[list[int]]:
    """Descriptors that become readable when honcho, or its process between us and it, ends; none without honcho.

    honcho starts one process of its own per service, and that one is our parent.

    Raises:
        PeerLost: honcho died while this process was starting.
    """
    descriptors: list[int] = []
    try:
        if under_honcho():
            parent = os.getppid()
            if parent == INIT_PID:
                raise PeerLost("honcho ended before this service started")
            for pid in (parent, parent_of(parent)):
                with contextlib.suppress(ProcessLookupError):
                    descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def parent_of(pid: int) -> int:
    """The parent's process id (proc(5), stat); init's if the process is gone."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return INIT_PID
    # pid (command, which may contain anything) state ppid ...
    return int(status.rpartition(")")[2].split()[1])
