"""Loading the dense weights takes the memory that they keep, and that of one tensor more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.checkpoint import synth_shapes
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.synth import SynthOptions, synthesise

# Enough to drown what an interpreter allocates meanwhile: 70 MB of dense weights, nearly all in layers.
WIDTH = synth_shapes.Width(8192, 512, 1024, 8, 512, 1024, 2, 1024, 32, 16, 64, 16, 256, 2, 1, 4, 2)
SLACK = 24 << 20

# VmHWM, because ru_maxrss is inherited from the parent (proc(5): writing 5 to clear_refs resets VmHWM).
LOAD = """
import json, sys
from pathlib import Path
import torch
from services.worker.model import Model
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
index, config = TensorIndex.open(sys.argv[1]), ModelConfig.from_dir(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = Model.load(index, config, 64)
print(json.dumps({"peak": status("VmHWM") - before, "kept": status("VmRSS") - before}))
"""


def test_a_load_never_holds_the_weights_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synth_shapes.WIDTHS, "wide", WIDTH)
    synthesise(tmp_path / "checkpoint", SynthOptions("wide"))
    tensors = TensorIndex.open(tmp_path / "checkpoint").tensors
    dense = [info.nbytes for name, info in tensors.items() if ".experts." not in name]
    assert sum(dense) > 2 * (max(dense) + SLACK), "a second copy would show"
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "checkpoint")], capture_output=True, text=True, check=True
    )
    memory = json.loads(run.stdout)
    assert memory["kept"] > sum(dense), "what is kept is float32"
    assert memory["peak"] < memory["kept"] + max(dense) + SLACK
