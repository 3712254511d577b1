"""A worker killed while it writes kept sessions leaves whole files, and at most a draft that the next one removes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

from services.worker.model import SegmentState
from services.worker.sessions import KeptSegment, SessionDisk
from services.worker.sessions.disk import DRAFT_SUFFIX, SUFFIX

ROOT = Path(__file__).resolve().parents[4]
ROUNDS, SEGMENT_BYTES = 2, 8 << 20
LIMIT = 4 * SEGMENT_BYTES


def big_segment() -> KeptSegment:
    state = SegmentState(1, 0, {}, {"0.ring": torch.arange(SEGMENT_BYTES // 4, dtype=torch.float32)})
    return KeptSegment(state, torch.zeros(4))


def write_for_ever(directory: Path) -> None:
    """What the child process does."""
    disk, segment = SessionDisk(directory, LIMIT), big_segment()
    for number in range(1 << 20):
        disk.save([number.to_bytes(32, "big")], segment)
        time.sleep(0.005)


def killed_while_writing(directory: Path) -> None:
    command = [sys.executable, "-c", f"from test_kill import *; write_for_ever(Path({str(directory)!r}))"]
    process = subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"})
    try:
        deadline = time.monotonic() + 60
        while not list(directory.glob(f"*{SUFFIX}")) or not list(directory.glob(f"*{DRAFT_SUFFIX}")):
            assert process.poll() is None
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()


def test_killed_at_any_moment(tmp_path: Path) -> None:
    left = 0
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        directory.mkdir()
        killed_while_writing(directory)
        left += len(list(directory.glob(f"*{DRAFT_SUFFIX}")))
        whole = list(directory.glob(f"*{SUFFIX}"))
        disk = SessionDisk(directory, LIMIT)
        try:
            assert not list(directory.glob(f"*{DRAFT_SUFFIX}"))
            for path in whole:
                kept = disk.load(bytes.fromhex(path.name.removesuffix(SUFFIX)))
                assert kept is not None
                assert kept.nbytes == big_segment().nbytes
        finally:
            disk.close()
    assert left, "no kill came in the middle of a write"
