"""expertd's read rate against plain O_DIRECT readers of the same bytes, at the same block size and depth.

`python -m benchmarks.reader DIRECTORY [--threads N] [--rounds R]`. DIRECTORY is where a checkpoint of full-width
experts (3.8 GB) is made, on the drive to be measured. The two take turns; the figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.report import save, show
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ExpertRecords
from shared.checkpoint.synth import SynthOptions, synthesise
from shared.memory.control_block import ControlBlock
from shared.memory.io_buffer import io_buffer
from shared.protocol.messages import FetchExperts, OpenPool, PoolOpened
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient
from tests.helpers.services import running, write_config

EXPERTS = 64
WAVE = 32
BLOCK = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        checkpoint = Path(directory) / "checkpoint"
        synthesise(checkpoint, SynthOptions(width="full", layers=1, experts=EXPERTS))
        plain, expertd = measure(Path(directory), checkpoint, args.threads, args.rounds)
    ratio = statistics.median(expertd) / statistics.median(plain)
    show(
        f"Reading {EXPERTS} experts of 12.75 MiB, {args.threads} at a time",
        {
            "plain O_DIRECT": f"{statistics.median(plain) / 1e9:.2f} GB/s",
            "expertd": f"{statistics.median(expertd) / 1e9:.2f} GB/s",
            "expertd / plain": f"{ratio:.2f}",
        },
    )
    save("reader", {"bytes_per_s_plain": plain, "bytes_per_s_expertd": expertd, "ratio": ratio})


def measure(directory: Path, checkpoint: Path, threads: int, rounds: int) -> tuple[list[float], list[float]]:
    """Bytes of records a second, one figure a round, read plainly and by expertd."""
    index = TensorIndex.open(checkpoint)
    records = ExpertRecords(index, ModelConfig.from_dir(checkpoint))
    nbytes = EXPERTS * records.layout.record_bytes
    config = write_config(
        directory / "icebox.toml",
        checkpoint,
        cache={"bytes": 2 * WAVE * records.layout.slot_bytes, "policy": "lru"},
        reader={"threads": threads},
    )
    plain, through = [], []
    with running(config, "expertd") as stack:
        client = BlockingClient(stack.config.endpoint("expertd"), make_identity("benchmark"))
        client.connect(5.0)
        pool = client.call(OpenPool(index.fingerprint, "cpu"), 5.0)
        assert isinstance(pool, PoolOpened)
        control = ControlBlock.open(pool.control_handle)
        for number in range(rounds):
            # The pool holds one layer of the two (the extra block is one), so every round reads everything.
            layer = number % 2
            plain.append(nbytes / read_plainly(records, layer, threads))
            through.append(nbytes / read_through(client, control, layer))
        control.close()
        client.close()
    return plain, through


def read_through(client: BlockingClient, control: ControlBlock, layer: int) -> float:
    """Seconds that expertd needs for all experts of a layer, asked as in prefill: one wave, and the next one ahead."""
    started = time.perf_counter()
    waves = [tuple(range(begin, begin + WAVE)) for begin in range(0, EXPERTS, WAVE)]
    control.busy = True
    for wave, ahead in zip(waves, [*waves[1:], ()], strict=True):
        ticket = client.start(FetchExperts(layer, wave, control.worker_clock))
        if ahead:
            client.forget(client.start(FetchExperts(layer, ahead, control.worker_clock + 1, is_ahead=True)))
        client.finish(ticket, 60.0)
        control.worker_clock += 1
    control.busy = False
    return time.perf_counter() - started


def read_plainly(records: ExpertRecords, layer: int, threads: int) -> float:
    """Seconds that threads need which do nothing but preadv the same stretches into memory of their own, huge pages."""
    work: queue.SimpleQueue[tuple[Path, int, int]] = queue.SimpleQueue()
    for expert in range(EXPERTS):
        for extent in records.plan(layer, expert).extents:
            begin = extent.offset // BLOCK * BLOCK
            work.put((extent.file, begin, -(-(extent.offset + extent.nbytes) // BLOCK) * BLOCK - begin))
    readers = [threading.Thread(target=_drain, args=(work, records.layout.slot_bytes)) for _ in range(threads)]
    started = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return time.perf_counter() - started


def _drain(work: queue.SimpleQueue[tuple[Path, int, int]], largest: int) -> None:
    buffer = io_buffer(largest + BLOCK)
    while True:
        try:
            path, offset, nbytes = work.get_nowait()
        except queue.Empty:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        done = 0
        while done < nbytes and (count := os.preadv(descriptor, [buffer[done:nbytes]], offset + done)):
            done += count
        os.close(descriptor)


if __name__ == "__main__":
    main()
