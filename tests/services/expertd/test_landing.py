"""When a record is published: after its bytes were seen in the slot, however long that takes; never if they were not.

A landing that is slow, torn and unreliable stands in for a GPU's.
"""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.expertd import TINY, Worker
from helpers.services import ROOT, Stack, write_config

from services.expertd import service as service_module
from services.expertd.__main__ import serve
from services.expertd.landing import Bytes
from shared.errors import DeviceError, ErrorCode, ExitCode, ServiceError
from shared.memory.control_block import ControlBlock
from shared.memory.host import HostSlab
from shared.protocol.messages import FetchExperts
from shared.runtime.boot import make_identity
from shared.runtime.context import ServiceContext

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
        self._is_landing = threading.Lock()

    def memory(self, slot: int) -> Bytes:
        self._demand(not self._is_landing.locked(), "a buffer was taken while it was copied")
        self._demand_withdrawn(slot)
        return self._buffer

    def land(self, slot: int) -> None:
        half = len(self._buffer) // 2
        with self._is_landing:
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
        self._demand(not (self.control.slot_table == slot).any(), "a slot was written while the table named it")

    def _demand(self, holds: bool, rule: str) -> None:
        if not holds:
            self.broken_rules.append(rule)


@contextmanager
def served(config_path: Path) -> Iterator[Stack]:
    """expertd in a thread of this process."""
    stack = Stack(config_path)
    stack.config.run_dir.mkdir(mode=0o700)
    context = ServiceContext(stack.config, make_identity("expertd"))
    thread = threading.Thread(target=serve, args=(context,))
    thread.start()
    try:
        while context.pong().state != "ready":
            assert thread.is_alive()
            time.sleep(0.01)
        yield stack
    finally:
        stack.closing.close()
        context.request_stop()
        thread.join()


@pytest.mark.parametrize("seed", range(3))
def test_no_look_up_sees_what_has_not_landed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    SlowLanding.broken_rules = []

    class Service(service_module.ExpertService):
        def start(self) -> None:
            SlowLanding.control = self._pool.control
            super().start()

    monkeypatch.setattr(service_module, "make_landing", SlowLanding)
    monkeypatch.setattr("services.expertd.__main__.ExpertService", Service)
    rng = random.Random(seed)
    config = write_config(tmp_path / "icebox.toml", TINY, cache={"bytes": 12 * SLOT_BYTES}, reader={"threads": 4})
    failures = []
    with served(config) as stack:
        worker = Worker(stack)
        worker.open()
        worker.control.busy = True
        for _ in range(60):
            layer, clock = rng.randrange(7), worker.control.worker_clock
            wave, ahead = sorted(rng.sample(range(16), 4)), tuple(rng.sample(range(16), 4))
            slots = worker.control.slot_table[layer, wave].tolist()
            missing = tuple(e for e, slot in zip(wave, slots, strict=True) if slot < 0)
            held = tuple(slot for slot in slots if slot >= 0)
            try:
                if missing:
                    ticket = worker.client.start(FetchExperts(layer, missing, clock, held))
                    worker.client.forget(worker.client.start(FetchExperts(layer, ahead, clock + 1, is_ahead=True)))
                    worker.client.finish(ticket, 10.0)
                for expert in wave:
                    worker.check(layer, expert)
            except ServiceError as error:
                failures.append((error.code, error.detail))
            worker.control.worker_clock += 1
    assert SlowLanding.broken_rules == []
    assert set(failures) == {(ErrorCode.IO_ERROR, "cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE")}
    assert len(failures) < 60


# expertd with landings whose device dies at the first copy.
DEAD = """
import sys; sys.path[:0] = ['.', 'tests']
from services.expertd import service
from services.expertd.__main__ import serve
from services.expertd.landing import HostLanding
from shared.errors import DeviceError
from shared.runtime.main import service_main

class Dead(HostLanding):
    def land(self, slot):
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
