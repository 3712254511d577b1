"""The stream writer: exact bytes for any cut of the input, and errors that name the file."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from pathlib import Path

import pytest

from shared.checkpoint import stream_writer
from shared.checkpoint.direct_file import SECTOR_BYTES
from shared.checkpoint.stream_writer import BLOCK_BYTES, StreamWriter


def write(path: Path, data: bytes) -> None:
    with StreamWriter(path) as file:
        file.write(memoryview(data))


@pytest.mark.parametrize("size", [0, 1, SECTOR_BYTES, SECTOR_BYTES + 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 12345])
def test_writes_exactly_what_it_is_given(tmp_path: Path, size: int) -> None:
    data, rng, done = random.Random(size).randbytes(size), random.Random(1), 0
    with StreamWriter(tmp_path / "file") as file:
        while done < size:
            step = rng.choice([1, 100, 4096, 1 << 20, 9 << 20])
            file.write(memoryview(data)[done : done + step])
            done += step
    assert (tmp_path / "file").read_bytes() == data


def test_goes_on_at_a_position(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 3 * SECTOR_BYTES)
    with StreamWriter(path, SECTOR_BYTES) as file:
        file.write(memoryview(b"b" * 10))
    assert path.read_bytes() == b"a" * SECTOR_BYTES + b"b" * 10


def test_an_error_leaves_a_prefix_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, hard))
    try:
        with pytest.raises(OSError, match="file") as caught:
            write(path, b"x" * 4 * BLOCK_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"x" * (5 << 20)


@pytest.mark.parametrize("call", ["ftruncate", "fdatasync"])
def test_an_error_of_a_descriptor_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stream_writer.os, call, full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "file", b"a")
    assert caught.value.filename == str(tmp_path / "file")


def test_nothing_is_written_behind_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, os_write, calls = tmp_path / "file", os.write, iter(range(100))

    def second_fails(fd: int, data: memoryview) -> int:
        if next(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return os_write(fd, data)

    monkeypatch.setattr(stream_writer.os, "write", second_fails)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write(path, b"a" * BLOCK_BYTES + b"b" * 7 * BLOCK_BYTES)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"a" * BLOCK_BYTES
