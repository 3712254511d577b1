"""Opening a full-size checkpoint: 69,187 tensors in 46 sparse files, seconds and memory.

`python -m benchmarks.headers`. The files have the real headers and no data, so only the parsing counts; it runs in a
fresh process, so that the peak memory is its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.report import save, show
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import INDEX_NAME
from shared.checkpoint.safetensors_writer import TensorSpec, encode_header, library_order
from shared.checkpoint.schedule import expected_tensors
from shared.checkpoint.synth_shapes import published_config

MEASURE = """
import json, sys, time
started = time.perf_counter()
from shared.checkpoint.index import TensorIndex
index = TensorIndex.open(sys.argv[1])
seconds = time.perf_counter() - started
peak = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"tensors": len(index.tensors), "files": len(index.files), "seconds": seconds, "peak_bytes": peak}))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_sparse(Path(directory))
        output = subprocess.run([sys.executable, "-c", MEASURE, directory], capture_output=True, check=True).stdout
    figures = json.loads(output)
    show(
        "Opening a full-size checkpoint",
        {
            "tensors": f"{figures['tensors']:,} in {figures['files']} files",
            "time": f"{figures['seconds']:.2f} s",
            "peak memory": f"{figures['peak_bytes'] / 1e6:.0f} MB",
        },
    )
    save("headers", figures)


def write_sparse(directory: Path) -> None:
    """The published preview's shards: real headers, holes for data."""
    published = published_config("full")
    shards: dict[str, list[TensorSpec]] = defaultdict(list)
    for name, (dtype, shape) in expected_tensors(ModelConfig.from_published(published)).items():
        part, *rest = name.split(".")
        shard = f"{part}.{rest[0]}" if part in ("layers", "mtp") else "embed" if part == "embed" else "head"
        shards[shard].append(TensorSpec(name, dtype, shape))
    weight_map = {}
    for number, specs in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = encode_header(library_order(specs))
        (directory / file).write_bytes(header)
        os.truncate(directory / file, len(header) + sum(spec.nbytes for spec in specs))
        weight_map |= {spec.name: file for spec in specs}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(published), encoding="utf-8")


if __name__ == "__main__":
    main()
