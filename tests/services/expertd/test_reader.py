"""Records come out right whatever their place in the file, and a changed file is an error with its name."""

import errno
import fcntl
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from helpers.descriptors import no_descriptor_left, num_descriptors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from services.expertd import reader as reader_module
from services.expertd import reads as reads_module
from services.expertd.landing import HostSlot, Staging
from services.expertd.reader import RecordReader
from services.expertd.reads import Arrival, AsyncReads
from shared.checkpoint.direct_file import SECTOR_BYTES as BLOCK
from shared.checkpoint.records import Extent, Piece, ReadPlan
from shared.errors import CheckpointError

DATA = np.random.default_rng(1).integers(0, 256, 5 * BLOCK + 123, dtype=np.uint8)


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    """What is read here comes in several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads_module, "PIECE", BLOCK)
        yield


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(DATA.tobytes())
    return path


def slot_of(nbytes: int) -> np.ndarray:
    """Page-aligned and zeroed, as slots are."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def plan(path, *extents) -> ReadPlan:
    return ReadPlan(
        "layers.0.ffn.experts.1", tuple(Extent(path, o, n, tuple(map(Piece._make, p))) for o, n, p in extents)
    )


def read(path, *extents, direct=True, slot_bytes=4 * BLOCK) -> np.ndarray:
    slot = slot_of(slot_bytes)
    with closing(RecordReader(direct, 4)) as reader, closing(AsyncReads()) as reads:
        reader.read(plan(path, *extents), HostSlot(slot, Staging()), reads)
    return slot


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, BLOCK), (BLOCK, 2 * BLOCK), (1, 100), (4095, 2), (BLOCK - 1, BLOCK + 2), (5 * BLOCK, 123)],
)
def test_one_piece_at_any_offset(file, direct, offset, nbytes):
    slot = read(file, (offset, nbytes, [(0, 0, nbytes)]), direct=direct)
    assert np.array_equal(slot[:nbytes], DATA[offset : offset + nbytes])


def test_pieces_land_where_the_plan_says(file):
    slot = read(file, (10, 50, [(0, 200, 20), (30, 100, 20)]), (3 * BLOCK + 7, 40, [(0, 0, 40)]))
    assert np.array_equal(slot[200:220], DATA[10:30])
    assert np.array_equal(slot[100:120], DATA[40:60])
    assert np.array_equal(slot[:40], DATA[3 * BLOCK + 7 : 3 * BLOCK + 47])


def test_nothing_is_written_outside_the_pieces_of_an_unaligned_record(file):
    slot = read(file, (10, 50, [(0, 200, 50)]))
    assert not slot[:200].any()
    assert not slot[250:].any()


PARTS = st.lists(st.sampled_from([100, 512, BLOCK, BLOCK + 1, 2 * BLOCK]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(PARTS, st.randoms(use_true_random=False), st.booleans())
def test_parts_in_any_order_and_at_any_place_do_not_touch_each_other(parts, rng, aligned):
    """Each part is a read of its own; in the file they may start at blocks and lie in another order."""
    targets = [sum(parts[:i]) for i in range(len(parts))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.safetensors"
        path.write_bytes(DATA.tobytes())
        places = [rng.randrange(3) * BLOCK + (0 if aligned else rng.randrange(BLOCK)) for _ in parts]
        order = rng.sample(range(len(parts)), len(parts))
        slot = read(path, *((places[i], parts[i], [(0, targets[i], parts[i])]) for i in order), slot_bytes=13 * BLOCK)
    expected = b"".join(DATA[place : place + n].tobytes() for place, n in zip(places, parts, strict=True))
    assert slot[: len(expected)].tobytes() == expected


def test_a_whole_aligned_record_goes_straight_into_its_slot(file, monkeypatch):
    monkeypatch.setattr(Staging, "buffer", None)
    slot = read(file, (BLOCK, 2 * BLOCK + 9, [(0, 0, 2 * BLOCK + 9)]))
    assert np.array_equal(slot[: 2 * BLOCK + 9], DATA[BLOCK : 3 * BLOCK + 9])


def change(path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, BLOCK)
    elif how == "grown":
        os.truncate(path, len(DATA) + 1)
    elif how == "replaced":
        other = path.with_suffix(".new")
        other.write_bytes(DATA.tobytes())
        os.replace(other, path)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "grown", "replaced", "gone"])
def test_a_file_that_changes_in_use_is_an_error_with_its_name(file, how):
    some, slot = plan(file, (0, 100, [(0, 0, 100)])), HostSlot(slot_of(BLOCK), Staging())
    with closing(RecordReader(True, 4)) as reader, closing(AsyncReads()) as reads:
        reader.read(some, slot, reads)
        change(file, how)
        with pytest.raises(CheckpointError, match=r"shard\.safetensors"):
            reader.read(some, slot, reads)


@pytest.mark.parametrize("how", ["truncated", "grown", "replaced", "gone"])
def test_a_file_that_changes_under_a_read_is_an_error_with_its_name(file, how, monkeypatch):
    real_read = AsyncReads.read

    def slow(reads, stretches):
        """So slow that the file has changed before the last piece is there."""
        with closing(real_read(reads, stretches)) as arrivals:
            yield next(arrivals)
            change(file, how)
            yield from arrivals

    monkeypatch.setattr(AsyncReads, "read", slow)
    with pytest.raises(CheckpointError, match=r"shard\.safetensors: (was replaced|cannot read layers.*No such file)"):
        read(file, (0, 3 * BLOCK, [(0, 0, 3 * BLOCK)]))


def test_a_record_beyond_the_end_is_an_error(file):
    with pytest.raises(CheckpointError, match="truncated"):
        read(file, (len(DATA) - 10, 20, [(0, 0, 20)]))


def refuse_at_open(monkeypatch, number: int) -> None:
    real_open = os.open

    def refusing(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number), str(path))
        return real_open(path, flags, *rest)

    monkeypatch.setattr(reader_module.os, "open", refusing)


def refuse_at_read(monkeypatch, number: int) -> None:
    real_read = AsyncReads.read

    def refusing(reads, stretches):
        """Once a piece has arrived."""
        with closing(real_read(reads, stretches)) as arrivals:
            yield next(arrivals)
            if any(fcntl.fcntl(stretch.descriptor, fcntl.F_GETFL) & os.O_DIRECT for stretch in stretches):
                raise OSError(number, os.strerror(number))
            yield from arrivals

    monkeypatch.setattr(AsyncReads, "read", refusing)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_read])
def test_a_file_system_without_o_direct_is_said_once(file, monkeypatch, caplog, refuse, number):
    refuse(monkeypatch, number)
    slot, second = slot_of(3 * BLOCK), file.with_name("other.safetensors")
    second.write_bytes(DATA.tobytes())
    with closing(RecordReader(True, 4)) as reader, closing(AsyncReads()) as reads:
        for path in (file, second):
            slot[:] = 0
            reader.read(plan(path, (5, 3 * BLOCK, [(0, 0, 3 * BLOCK)])), HostSlot(slot, Staging()), reads)
            assert np.array_equal(slot, DATA[5 : 3 * BLOCK + 5])
    assert not reader.is_direct
    assert [r.message for r in caplog.records if "O_DIRECT" in r.message] == [
        f"no O_DIRECT here, reading through the page cache file={file}"
    ]


@pytest.mark.parametrize("broken", ["shard", "other"])
def test_the_file_that_cannot_be_read_is_named(file, monkeypatch, broken):
    """A record may lie in several."""
    other, real_wait = file.with_name("other.safetensors"), AsyncReads._wait
    other.write_bytes(DATA.tobytes())

    def failing(reads):
        paths = [os.readlink(f"/proc/self/fd/{command.descriptor}") for command in reads._commands]
        return [(n, -errno.EIO if f"{broken}." in paths[n] else count) for n, count in real_wait(reads)]

    monkeypatch.setattr(AsyncReads, "_wait", failing)
    both = plan(file, (0, 100, [(0, 0, 100)]), (9000, 100, [(0, 100, 100)]))
    both = both._replace(extents=(both.extents[0], both.extents[1]._replace(file=other)))
    with (
        closing(RecordReader(True, 4)) as reader,
        closing(AsyncReads()) as reads,
        pytest.raises(CheckpointError, match=rf"{broken}\.safetensors: cannot read layers\.0\.\S+ \(Input/output"),
    ):
        reader.read(both, HostSlot(slot_of(BLOCK), Staging()), reads)


def test_reads_that_come_in_parts(file, monkeypatch):
    """The kernel may give less than was asked for, now and then."""
    real_read, real_rest = AsyncReads.read, os.preadv
    monkeypatch.setattr(reads_module, "PIECE", 3 * BLOCK)

    def short(reads, stretches):
        for number, begin, end, wanted in real_read(reads, stretches):
            stretches[number].out[begin + BLOCK : end] = 0
            yield Arrival(number, begin, begin + BLOCK, wanted)

    monkeypatch.setattr(AsyncReads, "read", short)
    monkeypatch.setattr(reads_module.os, "preadv", lambda fd, buffers, at: real_rest(fd, [buffers[0][:BLOCK]], at))
    slot = slot_of(3 * BLOCK)
    with closing(RecordReader(True, 4)) as reader, closing(AsyncReads()) as reads:
        reader.read(plan(file, (1, 3 * BLOCK, [(0, 0, 3 * BLOCK)])), HostSlot(slot, Staging()), reads)
        assert reader.is_direct
    assert np.array_equal(slot, DATA[1 : 3 * BLOCK + 1])


def test_nothing_is_left_open(file):
    with no_descriptor_left():
        read(file, (0, 100, [(0, 0, 100)]))


def test_many_threads_share_one_descriptor(file):
    reader = RecordReader(True, 4)

    def run(offset: int) -> bytes:
        slot = slot_of(BLOCK)
        with closing(AsyncReads()) as reads:
            reader.read(plan(file, (offset, 999, [(0, 0, 999)])), HostSlot(slot, Staging()), reads)
        return slot[:999].tobytes()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(run, range(0, 16000, 41))) == [DATA[o : o + 999].tobytes() for o in range(0, 16000, 41)]
    assert num_descriptors_of(file) == 1
    reader.close()
