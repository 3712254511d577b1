"""What the kept states depend on besides token ids: the checkpoint as it lies on the disk, and what computes here."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import torch

import kernels
from services.worker.sessions.path_budget import Key
from shared.checkpoint.index import TensorIndex

# The code whose change may change a bit of a state, or what a file of one means.
_CODE = (Path(kernels.__file__).parent, Path(__file__).parents[1])
_SUFFIXES = (".py", ".cuh")


def session_root(index: TensorIndex, device: str) -> Key:
    """The key before all others. Weights are told by their files' sizes and times: reading them would take minutes."""
    config = index.directory / "config.json"
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in (*index.files, config)]
    facts = [index.fingerprint, files, *_processor(device), torch.__version__, torch.get_num_threads(), _code()]
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def _processor(device: str) -> list[str]:
    """What computes, and what compiles for it besides torch."""
    if device == "cpu":
        return [torch.backends.cpu.get_cpu_capability()]
    return [torch.cuda.get_device_name(device), version("tilelang")]


def _code() -> str:
    digest = hashlib.sha256()
    for directory in _CODE:
        for path in sorted(path for path in directory.rglob("*") if path.suffix in _SUFFIXES):
            digest.update(f"{path.relative_to(directory)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
