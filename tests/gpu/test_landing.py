"""Records into GPU slots: the right bytes, copies under reads, and what happens when a copy fails."""

from __future__ import annotations

import queue
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from helpers.gpu import ROOT, read_gpu

from services.expertd.landing import Bytes, Landing, SlotWriter, make_landing
from services.expertd.landing_cuda import CudaLanding
from services.expertd.reader import RecordReader
from services.expertd.reads import PIECE, Reads, make_reads
from services.expertd.service import COPYING
from shared.checkpoint.records import Extent, Piece, ReadPlan
from shared.cuda.device import Device
from shared.errors import DeviceError
from shared.memory.cuda_slab import CudaSlab
from shared.memory.slab import create_slab

SLOT_BYTES = 3 * PIECE  # with two on their way, the third is read while the first is copied
RECORDS = 24
DEPTH = 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records"
    with path.open("wb") as out:
        for number in range(RECORDS):
            out.write(np.random.default_rng(number).bytes(SLOT_BYTES))
    return path


def plan(file: Path, number: int) -> ReadPlan:
    return ReadPlan(f"record {number}", (Extent(file, number * SLOT_BYTES, SLOT_BYTES, (Piece(0, 0, SLOT_BYTES),)),))


class OnlyRead:
    """Takes what is read and copies nothing."""

    def __init__(self, slot: SlotWriter) -> None:
        self.memory, self.staging = slot.memory, slot.staging

    def put(self, target: int, piece: Bytes) -> None: ...


def read_all(
    file: Path, slab: CudaSlab, lands: bool, checks: bool = False, num_threads: int = DEPTH + COPYING
) -> tuple[float, list[float]]:
    """Seconds that reader threads need for all records, each with a slot of its own, and wait for copies of each."""
    reader, waits = RecordReader(True, DEPTH), list[float]()
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(RECORDS):
        work.put(number)
    wrong: list[int] = []

    def run(thread: int, landing: Landing, reads: Reads) -> None:
        landing.enter_thread()
        while True:
            try:
                number = work.get_nowait()
            except queue.Empty:
                return
            with landing.into(thread) as slot:
                reader.read(plan(file, number), slot if lands else OnlyRead(slot), reads)
                read = time.perf_counter()
            waits.append(time.perf_counter() - read)
            if checks:
                expected = np.random.default_rng(number).bytes(SLOT_BYTES)
                wrong.extend([number] * (read_gpu(slab.address + thread * SLOT_BYTES, SLOT_BYTES) != expected))

    with ExitStack() as closing:
        landings = [make_landing(slab, SLOT_BYTES) for _ in range(num_threads)]
        for landing in landings:
            closing.callback(landing.close)
        reads = make_reads(len(landings))
        for own in reads:
            closing.callback(own.close)
        threads = [
            threading.Thread(target=run, args=(i, *own)) for i, own in enumerate(zip(landings, reads, strict=True))
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
    reader.close()
    assert wrong == []
    return seconds, waits


@pytest.fixture
def slab() -> CudaSlab:
    slab = create_slab((DEPTH + COPYING) * SLOT_BYTES, "cuda")
    assert isinstance(slab, CudaSlab)
    yield slab
    slab.close()


def test_records_are_right_when_many_threads_land_them(file: Path, slab: CudaSlab) -> None:
    read_all(file, slab, lands=True, checks=True)


def seconds_of_a_copy(slab: CudaSlab) -> float:
    landing = CudaLanding(slab, SLOT_BYTES)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        with landing.into(0) as slot:
            slot.put(0, slot.staging(SLOT_BYTES))
        times.append(time.perf_counter() - started)
    landing.close()
    return statistics.median(times)


def test_copies_run_under_reads(file: Path, slab: CudaSlab, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the same record: when it is read, little of its copy is left."""
    read_all(file, slab, lands=False)
    (alone, _), (landed, _) = (read_all(file, slab, lands) for lands in (False, True))
    _, waits = read_all(file, slab, lands=True, num_threads=1)  # copies of others would be in the way
    copy, wait = seconds_of_a_copy(slab), statistics.median(waits)
    with capsys.disabled():
        gigabytes = RECORDS * SLOT_BYTES / 1e9
        print(
            f"\n[reads alone {gigabytes / alone:.2f} GB/s, landed {gigabytes / landed:.2f} GB/s, "
            f"a copy {1e3 * copy:.2f} ms, {1e3 * wait:.2f} ms of it after the read]"
        )
    assert wait < 0.75 * copy


def fill(landing: CudaLanding, slot: int, value: int) -> None:
    with landing.into(slot) as writer:
        staging = writer.staging(4096)
        staging[:] = value
        writer.put(0, staging)


def test_a_refused_copy_is_an_error_of_this_record_only(slab: CudaSlab) -> None:
    elsewhere = CudaSlab(slab.device, slab.address + (1 << 45), slab.nbytes, b"", ExitStack())
    landing = CudaLanding(elsewhere, 4096)
    with pytest.raises(DeviceError, match=r"cu\w+: CUDA_ERROR_\w+"):
        fill(landing, 0, 3)
    assert landing.is_alive()
    landing.close()
    good = CudaLanding(slab, 4096)
    fill(good, 1, 7)
    assert read_gpu(slab.address + 4096, 4096) == b"\7" * 4096
    good.close()


# A kernel that fails takes the context with it, for every library of the process.
FAULT = """
import sys; sys.path[:0] = ['.', 'tests']
import torch
from services.expertd.landing_cuda import CudaLanding
from shared.errors import DeviceError
from shared.memory.slab import create_slab
slab = create_slab(8192, "cuda")
landing = CudaLanding(slab, 4096)
def fill(slot):
    with landing.into(slot) as writer:
        writer.put(0, writer.staging(4096))
fill(0)
assert landing.is_alive()
try:
    torch.zeros(1, device="cuda")[torch.tensor([10**6], device="cuda")].sum().item()
except Exception as error:
    print(type(error).__name__)
try:
    fill(1)
except DeviceError as error:
    print("refused", error.result)
print("alive" if landing.is_alive() else "dead")
landing.close()
slab.close()
print("closed", flush=True)
import os; os._exit(0)  # torch complains of the dead context when it goes
"""


def test_after_a_fault_the_context_is_known_to_be_dead(device: Device) -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", FAULT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "refused CUDA_ERROR" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("dead\nclosed\n"), done.stdout + done.stderr
