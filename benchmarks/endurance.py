"""Ten thousand tokens in the smallest pool, through cancels, a broken file and kills of both services.

    python -m benchmarks.endurance DIR [--device cuda] [--tokens 10000]

What `tests/gpu/test_endurance.py` does with the demo, on any checkpoint, such as the slice that `benchmarks.full_width`
makes, or better its pack. Nearly every look-up reads from the drive: 640 MB a token of that slice, so DIR is best in
memory (/dev/shm). A file in DIR changes its size now and then, and keeps it if this is killed then. Ends with an error
at the first wrong token, hang or leak; nobody else may use the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress

from benchmarks.report import save, show
from shared.cuda.device import Device
from tests.helpers.endurance import ENDS, KILLS, Plan, endure

LONGEST = 800
"""Tokens of an answer. A prompt of the longest kind reads all experts once a segment: 27 GB of that slice."""
THREADS = 8
"""Records that expertd reads at a time."""
SEGMENT = 128
"""Tokens of a prompt that are computed together; the longest prompt has two segments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=10_000)
    args = parser.parse_args()
    started = time.monotonic()
    with (
        Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress,
        tempfile.TemporaryDirectory() as work,
    ):
        task = progress.add_task("tokens in the smallest pool", total=args.tokens)
        plan = Plan(
            args.tokens,
            LONGEST,
            KILLS,
            sections={
                "model": {"max_context": 1024},
                "reader": {"threads": THREADS},
                "worker": {"device": args.device, "prefill_chunk": SEGMENT},
            },
            free_bytes=(lambda: 0) if args.device == "cpu" else free_bytes_of(args.device),
            advance=lambda count: progress.advance(task, count),
        )
        ends = endure(Path(work), args.directory.resolve(), plan)
        tokens = int(progress.tasks[task].completed)
    seconds = time.monotonic() - started
    kills = ", ".join(" and ".join(victims) for victims in KILLS)
    figures = {"tokens": tokens, "kills": KILLS, "seconds": seconds, "ends": dict(ends)}
    show(
        f"{tokens:,} tokens in the smallest pool: every answer as with everything in the pool",
        {"killed": kills, "seconds": f"{seconds:.0f}"} | {f"requests ended by {end}": str(ends[end]) for end in ENDS},
    )
    save("endurance", figures)


def free_bytes_of(name: str) -> Callable[[], int]:
    device = Device.named(name)
    return lambda: device.memory().free


if __name__ == "__main__":
    main()
