"""Kept segments in memory and in files: found again, within their limits, and nothing damaged or foreign believed."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from services.worker.model import SegmentState
from services.worker.sessions import KeptSegment, SessionDisk, SessionStore
from services.worker.sessions.disk import SUFFIX
from services.worker.sessions.segment import DamagedSegment, chain_keys
from shared.errors import ConfigError, LockedError

ROOT = b"r" * 32
PROMPT = [(1, 2, 3), (4, 5), (6,)]


def segment(position: int, size: int = 8) -> KeptSegment:
    """One whose content is its position."""
    state = SegmentState(
        position,
        0,
        {"0.entries": torch.full((size, 4), float(position)), "1.entries": torch.empty(0, 4)},
        {"0.ring": torch.full((3, 4), float(position), dtype=torch.bfloat16)},
    )
    return KeptSegment(state, torch.arange(5.0))


SIZE = segment(1).nbytes


def fill(store: SessionStore, segments: Sequence[Sequence[int]]) -> int:
    """Compute and keep what is not kept; how many segments were."""
    trail = store.follow(segments)
    for i in range(len(trail.kept), len(segments)):
        if trail.is_keeping:
            trail.add(segment(sum(map(len, segments[: i + 1]))))
    return len(trail.kept)


@contextmanager
def on_disk(directory: Path, limit: int = 1 << 20, memory: int = 1 << 20, root: bytes = ROOT) -> Iterator[SessionStore]:
    """A store as a worker has it from start to stop."""
    store = SessionStore(memory, root, SessionDisk(directory, limit))
    try:
        yield store
    finally:
        store.close()


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))


def same(one: KeptSegment, other: KeptSegment) -> bool:
    return one.encode(ROOT) == other.encode(ROOT)


# --- in memory ---


def test_a_prompt_finds_its_longest_kept_beginning() -> None:
    store = SessionStore(1 << 20)
    assert [fill(store, p) for p in (PROMPT, PROMPT, PROMPT[:2], [*PROMPT, (7,)])] == [0, 3, 2, 3]
    assert fill(store, [(1, 2), (3, 4, 5), (6,)]) == 0, "the same ids in other segments are computed otherwise"
    assert fill(store, [(1, 2, 3), (4, 6)]) == 1
    assert [kept.state.position for kept in store.follow(PROMPT).kept] == [3, 5, 6]
    assert store.stats()["session_hits"] == 5


def test_a_segment_is_found_only_behind_the_same_beginning() -> None:
    store = SessionStore(1 << 20)
    fill(store, PROMPT)
    assert fill(store, [(9,), (4, 5), (6,)]) == 0


@pytest.mark.parametrize("limit", [0, SIZE - 1])
def test_no_room_keeps_nothing(limit: int) -> None:
    store = SessionStore(limit)
    assert [fill(store, PROMPT), fill(store, PROMPT)] == [0, 0]
    assert store.stats()["session_bytes"] == 0


def test_a_prompt_longer_than_the_room_keeps_its_beginning() -> None:
    store = SessionStore(2 * SIZE)
    assert [fill(store, PROMPT), fill(store, PROMPT)] == [0, 2]


def test_the_oldest_ends_go_first() -> None:
    store = SessionStore(3 * SIZE)
    fill(store, PROMPT[:2])
    fill(store, [(8,)])
    fill(store, [(9,)])
    assert fill(store, PROMPT[:1]) == 1
    assert fill(store, PROMPT[:2]) == 1
    assert store.stats()["session_bytes"] == 3 * SIZE


# --- on the disk ---


def test_a_new_start_finds_what_was_kept(tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        fill(store, PROMPT)
        kept = store.follow(PROMPT).kept
    with on_disk(tmp_path) as store:
        found = store.follow([*PROMPT, (7,)]).kept
        assert len(found) == 3
        assert all(map(same, found, kept))
        stats = store.stats()
        assert (stats["session_disk_reads"], stats["session_disk_writes"]) == (3, 0)
        assert stats["session_disk_bytes"] == sum(path.stat().st_size for path in files(tmp_path))
        fill(store, PROMPT)
        assert store.stats()["session_disk_reads"] == 3, "now in memory"


def test_what_memory_gave_up_is_read_again(tmp_path: Path) -> None:
    with on_disk(tmp_path, memory=3 * SIZE) as store:
        fill(store, PROMPT)
        fill(store, [(7,), (8,), (9,)])
        wait_for(store, "session_disk_writes", 6)
        assert fill(store, PROMPT) == 3
        assert store.stats()["session_bytes"] == 3 * SIZE


def wait_for(store: SessionStore, key: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while store.stats()[key] < value:
        assert time.monotonic() < deadline, store.stats()
        time.sleep(0.005)


def test_another_checkpoint_finds_nothing_and_harms_nothing(tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        fill(store, PROMPT)
    with on_disk(tmp_path, root=b"s" * 32) as store:
        assert fill(store, PROMPT) == 0
    with on_disk(tmp_path) as store:
        assert fill(store, PROMPT) == 3


def test_the_limit_holds_and_the_oldest_go(tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        fill(store, PROMPT)
    size = files(tmp_path)[0].stat().st_size
    with on_disk(tmp_path, limit=4 * size) as store:
        fill(store, PROMPT[:2])  # the third is the oldest now
        fill(store, [(8,), (9,)])
    assert len(files(tmp_path)) == 4
    with on_disk(tmp_path, limit=4 * size) as store:
        assert [len(store.follow(p).kept) for p in (PROMPT, [(8,), (9,)])] == [2, 2]


def test_a_smaller_limit_is_met_at_the_start(tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        fill(store, PROMPT)
    size = files(tmp_path)[0].stat().st_size
    with on_disk(tmp_path, limit=2 * size) as store:
        assert len(files(tmp_path)) == 2
        assert len(store.follow(PROMPT).kept) == 2, "what was used last is what begins the path"


def cut_short(data: bytes) -> bytes:
    return data[:-5]


def flip_a_bit(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def garbage(data: bytes) -> bytes:
    return os.urandom(len(data))


def emptied(data: bytes) -> bytes:
    return b""


def boast(data: bytes) -> bytes:
    return b"\xff" * 8 + data[8:]


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, garbage, emptied, boast], ids=lambda f: f.__name__)
def test_a_damaged_file_is_computed_again(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    with on_disk(tmp_path) as store:
        fill(store, PROMPT)
    damaged = tmp_path / (chain_keys(ROOT, PROMPT)[1].hex() + SUFFIX)
    damaged.write_bytes(damage(damaged.read_bytes()))
    with on_disk(tmp_path) as store, caplog.at_level(logging.WARNING):
        assert fill(store, PROMPT) == 1
        assert str(damaged) in caplog.text
    with on_disk(tmp_path) as store:
        assert fill(store, PROMPT) == 3


def test_a_file_under_another_name_is_not_believed() -> None:
    one, two = chain_keys(ROOT, PROMPT[:2])
    data = segment(3).encode(one)
    assert same(KeptSegment.decode(one, data), segment(3))
    with pytest.raises(DamagedSegment, match="checksum"):
        KeptSegment.decode(two, data)


def test_strangers_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{'0' * 63}{SUFFIX}").write_text("nearly ours")
    (tmp_path / f"{'0' * 64}{SUFFIX}").mkdir()
    (tmp_path / f"{'1' * 64}{SUFFIX}").symlink_to(tmp_path / "notes.txt")
    before = sorted(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING), on_disk(tmp_path, limit=10) as store:
        fill(store, PROMPT)
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "lock"] == before
    assert "files=4" in caplog.text


def test_what_a_killed_worker_left_half_written_goes(tmp_path: Path) -> None:
    draft = tmp_path / f"{'a' * 64}.session.tmp"
    draft.write_bytes(b"half")
    with on_disk(tmp_path):
        assert not draft.exists()


def test_one_worker_at_a_time(tmp_path: Path) -> None:
    with on_disk(tmp_path), pytest.raises(LockedError, match=f"sessions in {tmp_path} as process {os.getpid()};.*"):
        SessionDisk(tmp_path, 1)
    with on_disk(tmp_path):
        pass


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"worker.session_dir = .*/file cannot be used"):
        SessionDisk(tmp_path / "file", 1)


def test_a_full_disk_costs_files_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with on_disk(tmp_path) as store:
        monkeypatch.setattr(Path, "write_bytes", full)
        assert [fill(store, PROMPT), fill(store, PROMPT)] == [0, 3]
        wait_for(store, "session_disk_errors", 3)
        monkeypatch.undo()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert store.stats()["session_disk_bytes"] == 0
        fill(store, [(8,)])
        wait_for(store, "session_disk_writes", 1)
    assert caplog.text.count("No space left on device") == 1


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """The first calls of this method of Path on files that are there fail."""
    method, refused = getattr(Path, name), itertools.count()

    def refusing(self: Path, *args, **kwargs):
        if self.exists() and next(refused) < times:
            raise OSError(errno.EIO, "Input/output error")
        return method(self, *args, **kwargs)

    monkeypatch.setattr(Path, name, refusing)


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


@pytest.mark.parametrize(("name", "left"), [("rename", 0), ("unlink", 2)])
def test_files_given_up_go_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: int
) -> None:
    big = segment(1, size=500)
    with on_disk(tmp_path, limit=len(big.encode(ROOT))) as store:
        fill(store, PROMPT)
        wait_for(store, "session_disk_writes", 3)
        refuse(monkeypatch, name, times=1)
        store.follow([(8,)]).add(big)  # needs the room of all others
        wait_for(store, "session_disk_errors", 1)
        assert len(files(tmp_path)) == left
        fill(store, [(9,)])
    stats = store.stats()
    assert stats["session_disk_errors"] == 1
    assert 0 < stats["session_disk_bytes"] == bytes_in(tmp_path) - (tmp_path / "lock").stat().st_size
    assert len(files(tmp_path)) == 1


def test_nothing_is_written_where_nothing_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk(tmp_path) as store:
        for name in ("rename", "unlink"):
            refuse(monkeypatch, name, times=100)
        fill(store, PROMPT)
        wait_for(store, "session_disk_errors", 3)
        assert len(list(tmp_path.iterdir())) == 2, "the lock and the first draft"
        monkeypatch.undo()
        fill(store, [(8,)])
    assert len(files(tmp_path)) == 1
    assert len(list(tmp_path.iterdir())) == 2, "the lock and the file"


def test_files_that_someone_removed_are_computed_again(tmp_path: Path) -> None:
    with on_disk(tmp_path, memory=SIZE) as store:
        fill(store, [(1,)])
        wait_for(store, "session_disk_writes", 1)
        fill(store, [(2,)])
        for path in files(tmp_path):
            path.unlink()
        assert fill(store, [(1,)]) == 0


def test_a_file_is_not_looked_for_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, may_write = threading.Event(), threading.Event()
    write_bytes = Path.write_bytes

    def slow(self: Path, data: bytes) -> int:
        writing.set()
        assert may_write.wait(20)
        return write_bytes(self, data)

    monkeypatch.setattr(Path, "write_bytes", slow)
    with on_disk(tmp_path, memory=SIZE) as store:
        fill(store, [(1,)])
        assert writing.wait(20)
        fill(store, [(2,)])
        assert not store.follow([(1,)]).kept, "given up in memory, and not on the disk yet"
        may_write.set()
        wait_for(store, "session_disk_writes", 1)
        assert len(store.follow([(1,)]).kept) == 1
        assert store.stats()["session_disk_errors"] == 0


def test_a_slow_disk_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while too much waits already is not written, and the worker goes on."""
    arrived: queue.Queue[None] = queue.Queue()
    slow = queue.Queue[None]()

    def wait(self: SessionDisk, path: Sequence[bytes], kept: KeptSegment) -> None:
        arrived.put(None)
        slow.get()

    monkeypatch.setattr(SessionDisk, "_write", wait)
    disk = SessionDisk(tmp_path, 1 << 20)
    store = SessionStore(1 << 20, ROOT, disk)
    for i in range(100):
        fill(store, [(i,)])
    arrived.get(timeout=20)
    assert 60 <= store.stats()["session_disk_skipped"] <= 68
    for _ in range(100):
        slow.put(None)
    store.close()
