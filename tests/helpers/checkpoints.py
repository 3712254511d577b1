"""Checkpoints for tests: made once per session and copied, so that a test may damage its own."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

from shared.checkpoint.index import INDEX_NAME, TensorIndex
from shared.checkpoint.safetensors_writer import TensorSpec, encode_header
from shared.checkpoint.synth import SynthOptions, synthesise


@functools.cache
def tiny_checkpoint(layers: int = 5, experts: int = 6, seed: int = 0) -> Path:
    """A directory that must not be changed: every kind of layer, about 3 MB. Removed when the process ends."""
    keeper = tempfile.TemporaryDirectory(prefix="icebox-tiny-")
    _KEEPERS.append(keeper)
    out = Path(keeper.name) / "checkpoint"
    synthesise(out, SynthOptions("tiny", layers, experts, seed))
    return out


def copy_of_tiny(directory: Path, layers: int = 5, experts: int = 6) -> Path:
    """A copy in `directory` that may be changed."""
    return Path(shutil.copytree(tiny_checkpoint(layers, experts), directory / "checkpoint"))


_KEEPERS: list[tempfile.TemporaryDirectory[str]] = []


def relay(source: Path, out: Path, shards: list[list[str]]) -> None:
    """Write the tensors of `source` into `out` again, cut into these shards and in this order."""
    index = TensorIndex.open(source)
    out.mkdir()
    shutil.copy(source / "config.json", out)
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = f"shard-{number}.safetensors"
        specs = [TensorSpec(name, index[name].dtype, index[name].shape) for name in names]
        data = b"".join(tensor_bytes(index, name) for name in names)
        (out / file_name).write_bytes(encode_header(specs) + data)
        weight_map |= dict.fromkeys(names, file_name)
    (out / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def tensor_bytes(index: TensorIndex, name: str) -> bytes:
    """What a tensor's stretch of its file holds."""
    info = index[name]
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return file.read(info.nbytes)
