"""Decoding on a slice of the published model: 8 layers of full width with 256 experts each, random weights.

    python -m benchmarks.full_width DIR [--parts services kernels misses bits] [--tokens N] [--plot OUT.png]

Makes the slice in DIR (31 GB; Zipf-skewed routing) unless it is there, measures the GPU's ceiling for reads, and then

* services: runs `icebox bench decode` with all and with 60 % of the experts in the pool. Tokens are sampled at
  temperature 1: greedy decoding of random weights soon repeats itself. After 1,000 tokens a pool that holds all experts
  has read nearly all;
* kernels: times every kernel of a step that hits (`benchmarks.decode_profile`);
* misses: what a miss costs beside the disk and the bus (`benchmarks.decode_misses`);
* bits: graphs beside their kernels launched one by one (`benchmarks.decode_bits`).

Each part has a file of its own in `results`: `full_width.json` for the services, the others under their modules' names.
Of the kernels `ms_per_layer` is a step's time over its layers, `ms_per_layer_without_start_head_sampling` the layers'
alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import decode_bits, decode_misses, decode_profile
from benchmarks.kernels_decode import ceiling
from benchmarks.report import save
from shared.checkpoint.index import INDEX_NAME
from shared.checkpoint.synth import SynthOptions, synthesise

ROOT = Path(__file__).resolve().parents[1]
SLICE = SynthOptions(width="full", layers=8, experts=256)
FRACTIONS = (1.0, 0.6)
CONFIG = """
[run]
name = "full-width"
[model]
path = {path}
max_context = 8192
[reader]
threads = 8
[worker]
device = "cuda"
prefill_chunk = 4096
"""
PARTS = ("services", "kernels", "misses", "bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; all of it")
    parser.add_argument("--tokens", type=int, default=1000, help="of each phase")
    parser.add_argument("--plot", type=Path, help="a PNG file of step times")
    args = parser.parse_args()
    # The index is written last: without it a checkpoint is not there, or not whole.
    if not (args.directory / INDEX_NAME).exists():
        started = time.monotonic()
        report = synthesise(args.directory, SLICE)
        print(f"{report.nbytes / 1e9:.1f} GB written in {time.monotonic() - started:.0f} s", flush=True)
    bytes_per_s = ceiling()
    torch.cuda.empty_cache()
    measures: dict[str, tuple[str, Callable[[], Any]]] = {
        "services": ("full_width", lambda: through_services(args.directory, args.tokens, bytes_per_s, args.plot)),
        "kernels": ("decode_profile", lambda: _alone(decode_profile.measure, args.directory, bytes_per_s)),
        "misses": ("decode_misses", lambda: _alone(decode_misses.measure, args.directory, args.tokens)),
        "bits": ("decode_bits", lambda: _alone(decode_bits.measure, args.directory)),
    }
    for part in args.parts:
        name, measure = measures[part]
        print(save(name, measure()), flush=True)


def _alone(measure: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of its own, whose end gives the GPU's memory back."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def through_services(checkpoint: Path, tokens: int, bytes_per_s: float, plot: Path | None) -> Any:
    """What `icebox bench decode --json` gives, without the single steps."""
    with tempfile.TemporaryDirectory() as name:
        config, out = Path(name) / "icebox.toml", Path(name) / "out.json"
        config.write_text(CONFIG.format(path=json.dumps(str(checkpoint.resolve()))), encoding="utf-8")
        command = [sys.executable, "-m", "services.cli", "bench", "decode", str(config), "--json", str(out)]
        command += ["--tokens", str(tokens), "--prompt", "4096", "--temperature", "1"]
        command += ["--ceiling", str(bytes_per_s / 1e12)]
        command += [f"--cache={fraction}" for fraction in FRACTIONS]
        command += ["--plot", str(plot.resolve())] if plot else []
        subprocess.run(command, cwd=ROOT, check=True)
        figures = json.loads(out.read_text(encoding="utf-8"))
    for run in figures["runs"]:
        for phase in run["phases"]:
            del phase["steps_ms"]  # thousands; the percentiles tell
    return figures


if __name__ == "__main__":
    main()
