"""Finds every tensor of a checkpoint directory from the headers of its shards, without reading data.

Owns the way from a directory to (file, offset, bytes). Does not know what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from shared.checkpoint.safetensors_header import TensorInfo, read_header
from shared.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Every tensor by name. `fingerprint` names this very set of headers: names, types, shapes and places."""

    directory: Path
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    fingerprint: str

    @classmethod
    def open(cls, directory: Path | str) -> TensorIndex:
        """Read the headers of all shards that the directory's index names.

        Raises:
            CheckpointError: no index, a shard missing, truncated or malformed, a tensor where the index does not say,
                or an index that points outside the directory. Names file and tensor.
        """
        directory = Path(directory)
        weight_map = read_weight_map(directory)
        files = tuple(directory / name for name in sorted(set(weight_map.values())))
        tensors: dict[str, TensorInfo] = {}
        for path in files:
            check_place(directory, path)
            for name, info in read_header(path).items():
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {name} is in {tensors[name].file.name} too")
                tensors[name] = info
        _check_map(directory, weight_map, tensors)
        return cls(directory, tensors, files, fingerprint_of(tensors))

    def __getitem__(self, name: str) -> TensorInfo:
        """Raises CheckpointError if there is no such tensor."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.directory}: tensor {name} is in no shard; download the checkpoint again")
        return info


def read_weight_map(directory: Path) -> dict[str, str]:
    """{tensor: file name} of the index, or of the only file."""
    path = directory / INDEX_NAME
    if not path.exists():
        if (directory / SINGLE_NAME).exists():
            return dict.fromkeys(read_header(directory / SINGLE_NAME), SINGLE_NAME)
        raise CheckpointError(f"{directory}: neither {INDEX_NAME} nor {SINGLE_NAME} is there; is it a checkpoint?")
    try:
        weight_map: Any = json.loads(path.read_text(encoding="utf-8")).get("weight_map")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as an index: {error}; download it again") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map; download it again")
    for name, file in weight_map.items():
        if not name.isprintable():
            raise CheckpointError(f"{path}: tensor {name!r}: its name cannot be printed")
        if not _is_file_name(file):
            raise CheckpointError(f"{path}: tensor {name} is said to be in {file!r}, which is not a file name here")
    return weight_map


def _is_file_name(value: Any) -> TypeGuard[str]:
    # What cannot be printed cannot be a path either (NUL, half a surrogate pair), or would upset a terminal.
    return isinstance(value, str) and value.isprintable() and Path(value).name == value and value not in ("", "..")


def check_place(directory: Path, path: Path) -> None:
    """Follow symbolic links (a download cache has them), but only to regular files."""
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; download it again") from None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be followed ({error}); replace the link") from error
    if not target.is_file():
        raise CheckpointError(f"{path}: not a regular file")


def _check_map(directory: Path, weight_map: dict[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        info = tensors.get(name)
        if info is None or info.file.name != file:
            where = "no shard has it" if info is None else f"it is in {info.file.name}"
            raise CheckpointError(f"{directory / INDEX_NAME}: tensor {name} should be in {file}, but {where}")


def fingerprint_of(tensors: Mapping[str, TensorInfo]) -> str:
    """32 hex digits that name this very set of headers."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        info = tensors[name]
        digest.update(f"{name} {info.file.name} {info.dtype} {info.shape} {info.offset}\n".encode())
    return digest.hexdigest()[:32]
