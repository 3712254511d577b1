"""Finding honcho above us."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from shared.errors import PeerLost
from shared.runtime import supervisor
from shared.runtime.supervisor import parent_of, watched_honcho


def test_without_honcho_nobody_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HONCHO_PROCESS_NAME", raising=False)
    with watched_honcho() as descriptors:
        assert descriptors == []


def test_parent_and_grandparent_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONCHO_PROCESS_NAME", "worker.1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        with watched_honcho() as descriptors:
            assert len(descriptors) == 2
            assert select.select(descriptors, [], [], 0)[0] == []
            parent.kill()
            assert select.select(descriptors, [], [], 5)[0] == descriptors[:1]
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


def test_a_service_that_starts_as_an_orphan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONCHO_PROCESS_NAME", "worker.1")
    monkeypatch.setattr(os, "getppid", lambda: supervisor.INIT_PID)
    with pytest.raises(PeerLost, match="honcho ended"):
        watched_honcho().__enter__()


def test_parents() -> None:
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(2**22 + 1) == supervisor.INIT_PID


def test_a_command_with_brackets_and_spaces() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') S 1 (x', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert parent_of(child.pid) == os.getpid()
        child.kill()
