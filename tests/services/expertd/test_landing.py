"""When a record is published: after its bytes were seen in the slot, however long that takes; never if they were not.

A landing that is slow, torn and unreliable stands in for a GPU's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.expertd import TINY, Worker, served
from helpers.services import ROOT, Stack, write_config
from hypothesis import given, settings
from hypothesis import strategies as st

from services.expertd import service as service_module
from services.expertd.landing import HostSlot, Staging
from services.expertd.landing_cuda import MARGIN, CudaSlot
from services.expertd.reader import RecordReader
from services.expertd.reads import Arrival, AsyncReads, Stretch
from services.expertd.scheduler import Scheduler
from services.expertd.slots import Slots
from shared.checkpoint.direct_file import SECTOR_BYTES as BLOCK
from shared.checkpoint.records import LARGEST_HOLE, PARTS, Extent, Piece, ReadPlan
from shared.errors import DeviceError, ErrorCode, ExitCode, ServiceError
from shared.memory.control_block import ControlBlock
from shared.memory.host import HostSlab
from shared.protocol.messages import FetchExperts

SLOT_BYTES = 28672
FAILURES = 0.15


class SlowLanding:
    """Copies in two halves with a pause between them, or fails after the first."""

    control: ControlBlock
    broken_rules: list[str]

    def __init__(self, slab: HostSlab, slot_bytes: int) -> None:
        self._slots = slab.view().reshape(-1, slot_bytes)
        self._buffer = np.frombuffer(mmap.mmap(-1, slot_bytes), np.uint8)
        self._rng = random.Random(7)
        self._staging = Staging()

    def enter_thread(self) -> None:
        pass

    @contextmanager
    def into(self, slot: int) -> Iterator[HostSlot]:
        self._demand_withdrawn(slot)
        yield HostSlot(self._buffer, self._staging)
        half = len(self._buffer) // 2
        self._slots[slot, :half] = self._buffer[:half]
        time.sleep(self._rng.uniform(0, 0.004))
        self._demand_withdrawn(slot)
        if self._rng.random() < FAILURES:
            raise DeviceError("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE")
        self._slots[slot, half:] = self._buffer[half:]
        self._buffer[:] = 0xEE

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        self._slots = self._slots[:0]

    def _demand_withdrawn(self, slot: int) -> None:
        if (self.control.slot_table == slot).any():
            self.broken_rules.append(f"slot {slot} was written while the table named it")


def look_ups(config: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[tuple[str, str]]:
    """60 look-ups in a small pool that slow landings fill, each checked at its end; the errors of those that fail."""
    SlowLanding.broken_rules = []

    class Service(service_module.ExpertService):
        def start(self) -> None:
            SlowLanding.control = self._pool.control
            super().start()

    monkeypatch.setattr(service_module, "make_landing", SlowLanding)
    monkeypatch.setattr("services.expertd.__main__.ExpertService", Service)
    rng = random.Random(seed)
    failures = []
    with served(config) as stack:
        worker = Worker(stack)
        worker.open()
        worker.control.busy = True
        for _ in range(60):
            layer, clock = rng.randrange(7), worker.control.worker_clock
            wave, ahead = sorted(rng.sample(range(16), 4)), tuple(rng.sample(range(16), 4))
            held = worker.look_up(layer, wave)
            missing = tuple(expert for expert in wave if expert not in held)
            try:
                if missing:
                    ticket = worker.client.start(FetchExperts(layer, missing, clock, tuple(held.values())))
                    time.sleep(rng.uniform(0, 0.01))  # what is wanted ahead may come after the answer
                    worker.client.forget(worker.client.start(FetchExperts(layer, ahead, clock + 1, is_ahead=True)))
                    worker.client.finish(ticket, 10.0)
                    held |= worker.look_up(layer, missing)
                    assert len(held) == len(wave)
            except ServiceError as error:
                failures.append((error.code, error.detail))
            time.sleep(rng.uniform(0, 0.01))
            # Not what the table says now: it may have given up what the look-up found.
            for expert, slot in held.items():
                worker.check_slot(slot, layer, expert)
            worker.control.worker_clock += 1
    return failures


@pytest.fixture
def small_pool(tmp_path: Path) -> Path:
    return write_config(tmp_path / "icebox.toml", TINY, cache={"bytes": 12 * SLOT_BYTES}, reader={"threads": 4})


@pytest.mark.parametrize("seed", range(3))
def test_no_look_up_sees_what_has_not_landed(small_pool: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    failures = look_ups(small_pool, monkeypatch, seed)
    assert SlowLanding.broken_rules == []
    assert set(failures) == {(ErrorCode.IO_ERROR, "cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE")}
    assert len(failures) < 60


FAULTS = {
    "a slot is free once its expert gave it up": (Slots, "retire", lambda self, slot, key, worker: self.free(slot)),
    "what did not land is published": (
        Scheduler,
        "finish",
        lambda self, load, is_read, finish=Scheduler.finish: finish(self, load, True),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_look_ups_find_a_fault(small_pool: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match="does not hold"):
        look_ups(small_pool, monkeypatch, 0)


class LateStream:
    """Copies nothing before it must."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int, int]] = []

    def start(self, target: int, source: int, nbytes: int) -> None:
        self.started.append((target, source, nbytes))

    def wait(self) -> None:
        for target, source, nbytes in self.started:
            ctypes.memmove(target, source, nbytes)


SIZES = st.lists(st.sampled_from([1, 100, BLOCK, BLOCK + 1, 3 * BLOCK]), min_size=len(PARTS), max_size=len(PARTS))


@settings(max_examples=60, deadline=None)
@given(
    SIZES, st.lists(st.sampled_from([0, 5, BLOCK, LARGEST_HOLE, LARGEST_HOLE + 1]), min_size=6, max_size=6), st.data()
)
def test_a_gpus_slot_gets_the_same_bytes_as_the_hosts(sizes: list[int], holes: list[int], data: st.DataObject) -> None:
    """Six tensors in any order in the file, any distance apart, in as few extents as that allows; copied at the end."""
    targets = [sum(sizes[:i]) for i in range(len(sizes))]
    extents: list[Extent] = []
    place = 0
    for i, hole in zip(data.draw(st.permutations(range(len(sizes)))), holes, strict=True):
        place += hole
        if extents and hole <= LARGEST_HOLE:
            file, offset, _, pieces = extents[-1]
            piece = Piece(place - offset, targets[i], sizes[i])
            extents[-1] = Extent(file, offset, place + sizes[i] - offset, (*pieces, piece))
        else:
            extents.append(Extent(Path("records"), place, sizes[i], (Piece(0, targets[i], sizes[i]),)))
        place += sizes[i]
    total = sum(sizes)
    slot_bytes = -(-total // BLOCK) * BLOCK
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.random.default_rng(total).bytes(place))
        file.flush()
        plan = ReadPlan("record", tuple(extent._replace(file=Path(file.name)) for extent in extents))
        host, gpu = np.zeros(slot_bytes, np.uint8), np.zeros(slot_bytes, np.uint8)
        stream, pinned = LateStream(), np.frombuffer(mmap.mmap(-1, slot_bytes + MARGIN), np.uint8)
        writers = HostSlot(host, Staging()), CudaSlot(gpu.ctypes.data, pinned, stream)
        with closing(RecordReader(True, 1)) as reader, closing(AsyncReads()) as reads:
            for writer in writers:
                reader.read(plan, writer, reads)
    stream.wait()
    assert np.array_equal(gpu[:total], host[:total])
    assert [writer.crc32(total) for writer in writers] == [zlib.crc32(host[:total].data)] * 2


def test_a_read_that_is_refused_and_tried_again_takes_no_second_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, nbytes = tmp_path / "records", 1 << 20
    path.write_bytes(bytes(range(256)) * (nbytes // 256))
    real_read = AsyncReads.read

    def refusing(reads: AsyncReads, stretches: Sequence[Stretch]) -> Generator[Arrival, None, None]:
        """Once a piece has arrived, and is being copied."""
        yield from real_read(reads, stretches)
        if fcntl.fcntl(stretches[0].descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")

    monkeypatch.setattr(AsyncReads, "read", refusing)
    gpu, stream = np.zeros(nbytes, np.uint8), LateStream()
    slot = CudaSlot(gpu.ctypes.data, np.frombuffer(mmap.mmap(-1, nbytes + MARGIN), np.uint8), stream)
    with closing(RecordReader(True, 1)) as reader, closing(AsyncReads()) as reads:
        reader.read(ReadPlan("record", (Extent(path, 0, nbytes, (Piece(0, 0, nbytes),)),)), slot, reads)
    stream.wait()
    assert gpu.tobytes() == path.read_bytes()


# expertd with landings whose device dies at the first copy.
DEAD = """
import sys; sys.path[:0] = ['.', 'tests']
from contextlib import contextmanager
from services.expertd import service
from services.expertd.__main__ import serve
from services.expertd.landing import HostLanding
from shared.errors import DeviceError
from shared.runtime.main import service_main

class Dead(HostLanding):
    @contextmanager
    def into(self, slot):
        with super().into(slot) as writer:
            yield writer
        raise DeviceError("cuEventSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE")
    def is_alive(self):
        return False

service.make_landing = Dead
sys.exit(service_main("expertd", None, serve))
"""


def test_a_dead_device_fails_the_request_and_ends_the_service(tmp_path: Path) -> None:
    config = write_config(tmp_path / "icebox.toml", TINY)
    stack = Stack(config)
    with stack.log_path("expertd").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", DEAD, "--config", str(config)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    stack.processes["expertd"] = process
    try:
        stack.wait_ready("expertd")
        worker = Worker(stack)
        worker.open()
        with pytest.raises(ServiceError, match="cuEventSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE") as failure:
            worker.fetch(0, 1)
        assert failure.value.code is ErrorCode.IO_ERROR
        assert process.wait(20) == ExitCode.CRASH
        assert "DeviceError: cuEventSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE" in stack.log("expertd")
    finally:
        stack.closing.close()
        process.kill()
        process.wait()
