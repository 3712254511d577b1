"""Writes a random checkpoint in the vendor's layout: same files, names, types and shapes, of any depth and width.

Owns which tensor goes into which shard and the order of writing; the index comes last, so a directory with an index
is complete. Shapes, values and the tokenizer are other modules' business.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.safetensors_writer import TensorSpec, encode_header, library_order
from shared.checkpoint.schedule import expected_tensors
from shared.checkpoint.stream_writer import StreamWriter
from shared.checkpoint.synth_shapes import GENERATION_CONFIG, published_config, reference_config
from shared.checkpoint.synth_tokenizer import tokenizer_files
from shared.checkpoint.synth_values import ValueSource
from shared.errors import CapacityError, CheckpointError, ConfigError

# A tokenizer is made for vocabularies that a few sentences can fill; the published one fits the full width.
LARGEST_OWN_VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """What to write. `layers` and `experts` None mean the width's own; `skew` is the exponent of the Zipf law."""

    width: str = "small"
    layers: int | None = None
    experts: int | None = None
    seed: int = 0
    skew: float = 0.8


@dataclass(frozen=True, slots=True)
class SynthReport:
    """What was written."""

    path: Path
    shards: int
    tensors: int
    nbytes: int


Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def synthesise(out: Path, options: SynthOptions, progress: Progress = lambda done, total: None) -> SynthReport:
    """Write the checkpoint into `out`, which must be missing or empty.

    Raises:
        ConfigError: the shape cannot be.
        CheckpointError: `out` holds something already, or cannot be written.
        CapacityError: the file system has too little room.
    """
    if not 0 <= options.skew <= 10:
        raise ConfigError(f"--skew {options.skew:g}: must be 0 to 10")
    published = published_config(options.width, options.layers, options.experts)
    expected = expected_tensors(ModelConfig.from_published(published))
    shards = _shards(expected)
    total = sum(spec.nbytes for specs in shards for spec in specs)
    _prepare(out, total)
    source = ValueSource(
        {name: shape for name, (_, shape) in expected.items()},
        published["num_experts_per_tok"],
        options.seed,
        options.skew,
    )
    try:
        _write_small_files(out, published)
        _write_shards(out, shards, source, lambda done: progress(done, total))
    except OSError as error:
        raise CheckpointError(f"{error.filename or out}: cannot write ({error.strerror}); delete {out}") from error
    return SynthReport(out, len(shards), len(expected), total)


def _shards(expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[list[TensorSpec]]:
    """The embedding, each layer, the head's part, each extra block: the published cut. Sorted as the library sorts."""
    groups: dict[tuple[int, int], list[TensorSpec]] = {}
    for name, (dtype, shape) in expected.items():
        groups.setdefault(_shard_key(name), []).append(TensorSpec(name, dtype, shape))
    return [library_order(groups[key]) for key in sorted(groups)]


def _shard_key(name: str) -> tuple[int, int]:
    head, number = name.split(".")[:2] if "." in name else (name, "")
    return {"embed": (0, 0), "layers": (1, _int(number)), "mtp": (3, _int(number))}.get(head, (2, 0))


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _prepare(out: Path, nbytes: int) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out}: exists and is not an empty directory; choose another name or delete it")
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written to ({error.strerror}); choose another place") from error
    if nbytes > free:
        raise CapacityError(f"{out}: needs {nbytes:,} bytes, the file system has {free:,} free")


def _write_small_files(out: Path, published: dict[str, Any]) -> None:
    _write_json(out / "config.json", published)
    _write_json(out / "generation_config.json", GENERATION_CONFIG)
    (out / "inference").mkdir()
    _write_json(out / "inference" / "config.json", reference_config(published))
    if published["vocab_size"] <= LARGEST_OWN_VOCABULARY:
        for name, content in tokenizer_files(published["vocab_size"]).items():
            _write_json(out / name, content)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(
    out: Path, shards: list[list[TensorSpec]], source: ValueSource, progress: Callable[[int], None]
) -> None:
    done = 0
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        done = _write_shard(out / name, specs, source, done, progress)
        weight_map |= dict.fromkeys((spec.name for spec in specs), name)
    index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out / "model.safetensors.index.json", index)


def _write_shard(
    path: Path, specs: list[TensorSpec], source: ValueSource, done: int, progress: Callable[[int], None]
) -> int:
    with StreamWriter(path) as file:
        file.write(memoryview(encode_header(specs)))
        for spec in specs:
            for chunk in source.chunks(spec):
                file.write(chunk.data)
                done += len(chunk)
            progress(done)
    return done
