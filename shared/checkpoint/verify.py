"""Finds everything that is wrong with a checkpoint directory, without stopping at the first thing.

`verify` looks at headers, names, types, shapes and sizes. `full` also reads every byte once, at disk speed, compares
checksums where there are any, and looks for impossible values. Says what to download again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.checkpoint.checksums import Checksum, lfs_pointer, published_checksum
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import check_place, read_weight_map
from shared.checkpoint.manifest import load_manifest
from shared.checkpoint.safetensors_header import TensorInfo, read_header
from shared.checkpoint.schedule import expected_tensors
from shared.checkpoint.verify_data import examine
from shared.errors import CheckpointError

Headers = dict[str, dict[str, TensorInfo]]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a file. `download_again` says whether a fresh copy of it would help."""

    file: str
    text: str
    download_again: bool = True


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`nbytes` is what the files hold, `checksums` how many were compared."""

    problems: tuple[Problem, ...]
    files: int
    tensors: int
    nbytes: int
    checksums: int

    @property
    def download_again(self) -> list[str]:
        """The files to fetch once more."""
        return sorted({problem.file for problem in self.problems if problem.download_again})


def verify(directory: Path, full: bool = False, progress: Progress = lambda done, total: None) -> VerifyReport:
    """Check a checkpoint as downloaded, or a packed one.

    Raises:
        CheckpointError: the directory is no checkpoint of a supported model at all, so that there is nothing to list.
    """
    config = ModelConfig.from_dir(directory)
    weight_map = read_weight_map(directory)
    names = sorted(set(weight_map.values()))
    headers: Headers = {}
    sizes: dict[str, int] = {}
    problems = [problem for name in names for problem in _read_file(directory, name, headers, sizes)]
    problems += _map_problems(weight_map, headers)
    problems += _schedule_problems(config, weight_map, headers)
    checksums = _checksums(directory, sizes) if full else {}
    if full:
        files = {name: (headers[name], sizes[name]) for name in sizes}
        found = examine(directory, files, checksums, config.n_routed_experts, progress)
        problems += [Problem(name, text) for name, text in found]
    problems += [Problem(name, "vanished while it was read") for name in sizes if not os.path.exists(directory / name)]
    return VerifyReport(
        problems=tuple(problems),
        files=len(names),
        tensors=sum(len(header) for header in headers.values()),
        nbytes=sum(sizes.values()),
        checksums=sum(len(sums) for sums in checksums.values()),
    )


def _read_file(directory: Path, name: str, headers: Headers, sizes: dict[str, int]) -> Iterator[Problem]:
    path = directory / name
    try:
        check_place(directory, path)
        if lfs_pointer(path):
            yield Problem(name, "is a Git LFS pointer, not the file; `git lfs pull` fetches it")
            return
        headers[name], sizes[name] = read_header(path), path.stat().st_size
    except CheckpointError as error:
        yield Problem(name, str(error).removeprefix(f"{path}: "))
    except OSError as error:
        yield Problem(name, f"cannot be read ({error.strerror})")


def _map_problems(weight_map: dict[str, str], headers: Headers) -> Iterator[Problem]:
    places: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if name in places:
                yield Problem(file, f"tensor {name} is in {places[name]} too")
            places[name] = file
    for name, file in weight_map.items():
        if file in headers and name not in headers[file]:
            where = f"; it is in {places[name]}" if name in places else ""
            yield Problem(file, f"tensor {name}, which the index puts here, is missing{where}")


def _schedule_problems(config: ModelConfig, weight_map: dict[str, str], headers: Headers) -> Iterator[Problem]:
    found = {name: (file, info) for file, header in headers.items() for name, info in header.items()}
    for name, (dtype, shape) in expected_tensors(config).items():
        if name in found:
            file, info = found[name]
            if (info.dtype, info.shape) != (dtype, shape):
                yield Problem(file, f"tensor {name} is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)}")
        elif name not in weight_map:
            yield Problem("model.safetensors.index.json", f"tensor {name} of the model is in no file")


def _checksums(directory: Path, sizes: dict[str, int]) -> dict[str, list[Checksum]]:
    manifest = load_manifest(directory)
    if manifest:
        return {name: file.with_header() for name, file in manifest.files.items() if name in sizes}
    published = {name: published_checksum(directory / name, nbytes) for name, nbytes in sizes.items()}
    return {name: [checksum] for name, checksum in published.items() if checksum}
