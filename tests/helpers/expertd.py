"""expertd alone, as a process or in a thread, and a worker of the test's own that asks it and looks into its pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from helpers.gpu import read_gpu
from helpers.services import ROOT, Stack, running, write_config
from services.expertd.__main__ import serve
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ExpertRecords
from shared.errors import ErrorCode, ServiceError
from shared.memory.control_block import ControlBlock
from shared.memory.host import HostSlab
from shared.memory.slab import Slab, open_slab
from shared.protocol.messages import FetchExperts, OpenPool, PoolOpened
from shared.runtime.boot import make_identity
from shared.runtime.context import ServiceContext
from shared.transport.client import BlockingClient

TINY = ROOT / "tests" / "golden" / "tiny-a"


@contextmanager
def expertd(tmp_path: Path, checkpoint: Path = TINY, **sections: dict[str, object]) -> Iterator[Stack]:
    config = write_config(tmp_path / "icebox.toml", checkpoint, **sections)
    with running(config, "expertd") as stack:
        yield stack


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


class Worker:
    """A test's own worker: it maps the pool and looks, like the real one."""

    def __init__(self, stack: Stack, checkpoint: Path = TINY) -> None:
        self._stack = stack
        self.client = BlockingClient(stack.config.endpoint("expertd"), make_identity("test"))
        stack.closing.callback(self.client.close)
        self.client.connect(5.0)
        self.index = TensorIndex.open(checkpoint)
        self.records = ExpertRecords(self.index, ModelConfig.from_dir(checkpoint))
        self.pool: PoolOpened | None = None

    def open(self) -> None:
        device = self._stack.config.worker.device
        reply = self.client.call(OpenPool(self.index.fingerprint, device), 5.0)
        assert isinstance(reply, PoolOpened)
        self.pool = reply
        self.control = ControlBlock.open(reply.control_handle)
        self._stack.closing.callback(self.control.close)
        self.slab = open_slab(reply.slab_handle, device)
        self._stack.closing.callback(self.slab.close)

    def can_open(self) -> bool:
        try:
            self.open()
        except ServiceError as error:
            if error.code is not ErrorCode.NO_CAPACITY:
                raise
            return False
        return True

    def fetch(self, layer: int, *expert_ids: int, clock: int = 0) -> object:
        return self.client.call(FetchExperts(layer, expert_ids, clock), 5.0)

    def look_up(self, layer: int, expert_ids: Sequence[int]) -> dict[int, int]:
        """The slots of those that the table names. They stay as they are until the clock moves, the table may not."""
        slots = self.control.slot_table[layer, list(expert_ids)].tolist()
        return {expert: slot for expert, slot in zip(expert_ids, slots, strict=True) if slot >= 0}

    def check(self, layer: int, expert: int) -> None:
        """The slot that the table names holds this expert's bytes."""
        self.check_slot(int(self.control.slot_table[layer, expert]), layer, expert)

    def check_slot(self, slot: int, layer: int, expert: int) -> None:
        """This slot holds this expert's bytes, read from the files once more."""
        assert slot >= 0, f"expert {expert} of layer {layer} has no slot"
        assert self.pool is not None
        expected = bytearray(self.records.layout.record_bytes)
        self.records.read_record(layer, expert, memoryview(expected))
        found = slab_bytes(self.slab, slot * self.pool.slot_bytes, len(expected))
        assert found == bytes(expected), f"slot {slot} does not hold expert {expert} of layer {layer}"


def slab_bytes(slab: Slab, offset: int, nbytes: int) -> bytes:
    """What a slab holds, wherever it is."""
    if isinstance(slab, HostSlab):
        return slab.view()[offset : offset + nbytes].tobytes()
    return read_gpu(slab.address + offset, nbytes)
