"""Checkpoints on this machine's disk: synth, verify --full against cat, pack against cp, and reading records.

`python -m benchmarks.checkpoint [--folder DIR] [--layers N] [--only PART]`. Everything is at full width, everything
compared is measured side by side in one run, and ratios are medians over the rounds. Needs about 19 GB + 11 GB a layer
there. One part alone is shown and not saved.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.report import save, show
from services.expertd.landing import HostSlot, Staging
from services.expertd.reader import RecordReader
from services.expertd.reads import make_reads
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.pack import pack
from shared.checkpoint.records import ExpertRecords, ReadPlan
from shared.checkpoint.synth import SynthOptions, synthesise
from shared.checkpoint.verify import verify
from shared.memory.io_buffer import io_buffer

ROUNDS = 3
PARTS = ("synth", "verify", "pack", "read")
THREADS = 8
RECORDS_A_ROUND = 160
GB = 1e9

Figures = dict[str, float]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def note(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    os.sync()
    for path in directory.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def measure_synth(source: Path, layers: int) -> Figures:
    note("writing a checkpoint")
    took = seconds(lambda: synthesise(source, SynthOptions("full", layers)))
    speed, raw = size_of(source) / took / GB, raw_write(source.with_name("raw"))
    return {
        "gigabytes": size_of(source) / GB,
        "synth_gb_s": speed,
        "raw_write_gb_s": raw,
        "synth_over_raw": speed / raw,
    }


def raw_write(path: Path, blocks: int = 400) -> float:
    """Bytes a second / 10^9 of plain O_DIRECT writes of 8 MiB random blocks."""
    block = io_buffer(8 << 20)
    block[:] = random.Random(0).randbytes(len(block))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

    def write() -> None:
        for _ in range(blocks):
            os.write(fd, block)
        os.fdatasync(fd)

    took = seconds(write)
    os.close(fd)
    path.unlink()
    return blocks * len(block) / took / GB


def measure_verify(source: Path, kind: str) -> Figures:
    cat, ours, nbytes = [], [], size_of(source)
    files = sorted(source.glob("*.safetensors"))
    for _ in range(ROUNDS):
        forget(source)
        cat.append(seconds(lambda: subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)))
        forget(source)
        ours.append(seconds(lambda: verify(source, full=True)))
        note(f"{kind}: cat {cat[-1]:.1f} s, verify {ours[-1]:.1f} s")
    return {
        f"verify_{kind}_gb_s": nbytes / statistics.median(ours) / GB,
        f"cat_cold_beside_{kind}_gb_s": nbytes / statistics.median(cat) / GB,
        f"verify_{kind}_over_cat": statistics.median(c / v for c, v in zip(cat, ours, strict=True)),
    }


def measure_verify_both(source: Path) -> Figures:
    figures = measure_verify(source, "full")
    write_digests(source)
    return figures | measure_verify(source, "full_with_sha256")


def write_digests(source: Path) -> None:
    """What a download that keeps checksums has: FILE.sha256 beside every shard."""
    for path in source.glob("*.safetensors"):
        run = subprocess.run(["sha256sum", path.name], cwd=source, capture_output=True, text=True, check=True)
        path.with_name(f"{path.name}.sha256").write_text(run.stdout)


def measure_pack(source: Path, folder: Path) -> Figures:
    copied, synced, ours, nbytes = [], [], [], size_of(source)
    for _ in range(ROUNDS):
        forget(source)
        started = time.perf_counter()
        subprocess.run(["cp", "-r", source, folder / "copy"], check=True)
        copied.append(time.perf_counter() - started)
        os.sync()
        synced.append(time.perf_counter() - started)
        shutil.rmtree(folder / "copy")
        forget(source)
        shutil.rmtree(folder / "pack", ignore_errors=True)
        ours.append(seconds(lambda: pack(source, folder / "pack")))
        note(f"cp {copied[-1]:.1f} s ({synced[-1]:.1f} s with sync), pack {ours[-1]:.1f} s")
    return {
        "pack_gb_s": nbytes / statistics.median(ours) / GB,
        "cp_gb_s": nbytes / statistics.median(copied) / GB,
        "cp_and_sync_gb_s": nbytes / statistics.median(synced) / GB,
        "pack_over_cp": statistics.median(c / p for c, p in zip(copied, ours, strict=True)),
        "pack_over_cp_and_sync": statistics.median(c / p for c, p in zip(synced, ours, strict=True)),
    }


def measure_reads(source: Path, packed: Path) -> Figures:
    if not packed.exists():
        note("packing")
        pack(source, packed)
    places = {"in_place": plans_of(source), "packed": plans_of(packed)}
    speeds: dict[str, list[float]] = {"in_place": [], "packed": [], "raw": []}
    for number in range(ROUNDS):
        chosen = random.Random(number).sample(range(len(places["packed"])), min(RECORDS_A_ROUND, len(places["packed"])))
        for kind, plans in places.items():
            speeds[kind].append(read_records([plans[i] for i in chosen]))
        speeds["raw"].append(read_raw([places["packed"][i] for i in chosen]))
        note("reads: " + ", ".join(f"{kind} {values[-1]:.2f} GB/s" for kind, values in speeds.items()))
    figures = {f"read_{kind}_gb_s": statistics.median(values) for kind, values in speeds.items()}
    for kind in places:
        pairs = zip(speeds[kind], speeds["raw"], strict=True)
        figures[f"read_{kind}_over_raw"] = statistics.median(ours / raw for ours, raw in pairs)
    return figures | {f"reads_per_record_{kind}": float(len(plans[0].extents)) for kind, plans in places.items()}


def plans_of(directory: Path) -> list[ReadPlan]:
    config = ModelConfig.from_dir(directory)
    records = ExpertRecords(TensorIndex.open(directory), config)
    return [records.plan(m, e) for m in range(config.num_moe_layers) for e in range(config.n_routed_experts)]


def read_records(plans: list[ReadPlan]) -> float:
    """Bytes a second / 10^9 of expertd's reader, `THREADS` at a time."""
    reader = RecordReader(direct=True, depth=THREADS)
    nbytes = sum(piece.nbytes for extent in plans[0].extents for piece in extent.pieces)

    def work(share: list[ReadPlan]) -> None:
        # Shared memory in small pages, as the pool's is.
        slot = HostSlot(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8), Staging())
        (reads,) = make_reads(1)
        for plan in share:
            reader.read(plan, slot, reads)
        reads.close()

    took = seconds(lambda: in_threads(work, plans))
    reader.close()
    return nbytes * len(plans) / took / GB


def read_raw(plans: list[ReadPlan]) -> float:
    """The same stretches with nothing but preadv into memory of huge pages."""
    extents = [plan.extents[0] for plan in plans]
    files = {extent.file: os.open(extent.file, os.O_RDONLY | os.O_DIRECT) for extent in extents}

    def work(share: list[ReadPlan]) -> None:
        buffer = io_buffer(extents[0].nbytes)
        for plan in share:
            os.preadv(files[plan.extents[0].file], [buffer], plan.extents[0].offset)

    took = seconds(lambda: in_threads(work, plans))
    for fd in files.values():
        os.close(fd)
    return extents[0].nbytes * len(plans) / took / GB


def in_threads(work: Callable[[list[ReadPlan]], None], plans: list[ReadPlan]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, [plans[i::THREADS] for i in range(THREADS)]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument(
        "--layers", type=int, default=1, help="backbone layers of 256 experts; one extra block comes on top"
    )
    parser.add_argument("--only", choices=PARTS, help="measure this part alone; all begin with synth")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="icebox-bench-", dir=arguments.folder) as name:
        figures = measure(Path(name), arguments.layers, (arguments.only,) if arguments.only else PARTS)
    show("checkpoints", {key: f"{value:.2f}" for key, value in figures.items()})
    if not arguments.only:
        print(save("checkpoint", {key: round(value, 3) for key, value in figures.items()}))


def measure(folder: Path, layers: int, parts: Sequence[str]) -> Figures:
    source, packed = folder / "source", folder / "pack"
    figures = measure_synth(source, layers)
    if "verify" in parts:
        figures |= measure_verify_both(source)
    if "pack" in parts:
        figures |= measure_pack(source, folder)
    if "read" in parts:
        figures |= measure_reads(source, packed)
    return figures


if __name__ == "__main__":
    main()
