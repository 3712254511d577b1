"""What the kept states depend on besides token ids: the checkpoint as it lies on the disk, and what computes here."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import torch

from services.worker.sessions.path_budget import Key
from shared.checkpoint.index import TensorIndex

# Goes up when a worker would read another meaning, or other bits, from a segment kept by the one before it.
FORMAT = 1


def session_root(index: TensorIndex, device: str) -> Key:
    """The key before all others. Weights are told by their files' sizes and times: reading them would take minutes."""
    config = index.directory / "config.json"
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in (*index.files, config)]
    computes = [device, torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    facts = [FORMAT, version("icebox"), index.fingerprint, stats, computes]
    return hashlib.sha256(json.dumps(facts).encode()).digest()
