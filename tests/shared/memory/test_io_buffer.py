"""What the kernel was asked for, and that a drive reads into it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from shared.memory.io_buffer import io_buffer

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(memory: memoryview) -> list[str]:
    """The kernel's flags of the mapping (proc(5), smaps, VmFlags)."""
    address, found = ctypes.addressof(ctypes.c_char.from_buffer(memory)), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            begin, end = (int(number, 16) for number in word.split("-"))
            found = begin <= address < end
        elif found and word == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no such mapping")


def test_children_do_not_share_it() -> None:
    assert "dc" in flags_of(io_buffer(8 << 20))


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no huge pages")
def test_huge_pages_are_asked_for() -> None:
    assert "hg" in flags_of(io_buffer(8 << 20))


def test_a_kernel_without_huge_pages_gives_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    memory = io_buffer(4096)
    assert bytes(memory) == bytes(4096)
    memory[:] = b"x" * 4096


def test_a_file_is_read_into_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"y" * 8192)
    memory = io_buffer(8192)
    with (tmp_path / "file").open("rb") as file:
        assert os.preadv(file.fileno(), [memory], 0) == 8192
    assert memory == b"y" * 8192
