"""Reads that are on their way together: all of the bytes, each once, and nothing after the end."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from services.expertd import reads as reads_module
from services.expertd.reads import AsyncReads, BlockingReads, Reads, Stretch, make_reads
from shared.checkpoint.direct_file import SECTOR_BYTES as BLOCK

HERE = Path("here")
DATA = np.random.default_rng(2).integers(0, 256, 40 * BLOCK + 77, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    path.write_bytes(DATA.tobytes())
    return path


@pytest.fixture(params=[AsyncReads, BlockingReads])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    monkeypatch.setattr(reads_module, "PIECE", BLOCK)
    with closing(request.param()) as own:
        yield own


@pytest.fixture(params=[0, os.O_DIRECT], ids=["cached", "direct"])
def descriptor(request: pytest.FixtureRequest, file: Path) -> Iterator[int]:
    own = os.open(file, os.O_RDONLY | request.param)
    yield own
    os.close(own)


def memory(blocks: int) -> np.ndarray:
    """Page-aligned, of ones."""
    out = np.frombuffer(mmap.mmap(-1, blocks * BLOCK), np.uint8)
    out[:] = 1
    return out


@pytest.mark.parametrize("blocks", [1, 2, 3, 35])
def test_everything_arrives_once(reads: Reads, descriptor: int, blocks: int) -> None:
    out = memory(blocks + 1)
    for offset in (0, 3 * BLOCK):  # the second time too
        arrived = sorted(reads.read([Stretch(HERE, descriptor, offset, out[: blocks * BLOCK])]))
        assert arrived == [(0, b, b + BLOCK, b + BLOCK) for b in range(0, blocks * BLOCK, BLOCK)]
        assert np.array_equal(out[: blocks * BLOCK], DATA[offset : offset + blocks * BLOCK])
        assert (out[blocks * BLOCK :] == 1).all()


def test_several_stretches(reads: Reads, descriptor: int) -> None:
    places = ((7, 1), (20, 5), (0, 2), (30, 3))
    outs = [memory(blocks) for _, blocks in places]
    stretches = [Stretch(HERE, descriptor, place * BLOCK, out) for (place, _), out in zip(places, outs, strict=True)]
    arrived = list(reads.read(stretches))
    assert len(arrived) == len(set(arrived)) == 11
    for (place, blocks), out in zip(places, outs, strict=True):
        assert np.array_equal(out, DATA[place * BLOCK : (place + blocks) * BLOCK])


def test_nothing_is_nothing(reads: Reads) -> None:
    assert list(reads.read([])) == []


def test_a_file_that_ends_early_comes_short(reads: Reads, descriptor: int) -> None:
    arrived = sorted(reads.read([Stretch(HERE, descriptor, 38 * BLOCK, memory(4))]))
    ends = [BLOCK, 2 * BLOCK, 2 * BLOCK + 77, 3 * BLOCK]
    assert [(each.end, each.wanted) for each in arrived] == list(zip(ends, range(BLOCK, 5 * BLOCK, BLOCK), strict=True))


def test_an_error_leaves_nothing_for_the_next_read(reads: Reads, descriptor: int, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    for wrong in (folder, 1_000_000):
        for stretches in ([wrong], [descriptor, wrong], [wrong, descriptor]):
            with pytest.raises(OSError, match=r"(directory|Invalid argument|Bad file descriptor): 'here'"):
                list(reads.read([Stretch(HERE, each, 0, memory(3)) for each in stretches]))
    os.close(folder)
    out = memory(3)
    assert len(list(reads.read([Stretch(HERE, descriptor, 0, out)]))) == 3
    assert np.array_equal(out, DATA[: 3 * BLOCK])


def test_an_error_of_one_read_waits_for_the_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O_DIRECT refuses an offset within a block; here that of the second stretch."""
    monkeypatch.setattr(reads_module, "PIECE", BLOCK)
    own, out = os.open(file, os.O_RDONLY | os.O_DIRECT), memory(8)
    with closing(AsyncReads()) as reads:
        with pytest.raises(OSError, match="Invalid argument") as caught:
            list(reads.read([Stretch(HERE, own, 0, out[: 3 * BLOCK]), Stretch(HERE, own, 1, out[3 * BLOCK :])]))
        assert caught.value.errno == errno.EINVAL
        out[:] = 2
        time.sleep(0.1)
        assert (out == 2).all()
        assert len(list(reads.read([Stretch(HERE, own, 0, out)]))) == 8
    os.close(own)


def test_nothing_arrives_after_it_was_closed(reads: Reads, descriptor: int) -> None:
    out = memory(30)
    with closing(reads.read([Stretch(HERE, descriptor, 0, out)])) as arrivals:
        next(arrivals)
    out[:] = 3
    time.sleep(0.1)
    assert (out == 3).all()
    assert len(list(reads.read([Stretch(HERE, descriptor, 0, out)]))) == 30, "its own and no older ones"


def test_a_kernel_without_them_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reads_module.platform, "machine", lambda: "m68k")
    assert [type(each) for each in make_reads(3)] == [BlockingReads] * 3
    assert [r.message for r in caplog.records] == [
        "no asynchronous reads here (not known on m68k): records are read piece by piece"
    ]


def test_closing_gives_the_kernels_memory_back() -> None:
    def in_use() -> int:
        return sum("[aio]" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = in_use()
    own = make_reads(5)
    assert in_use() == before + 5
    for each in own:
        each.close()
        each.close()
    assert in_use() == before
