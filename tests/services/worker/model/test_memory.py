"""The model holds what the plan says, and loading it takes no more than one tensor besides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.model import Model
from shared.checkpoint import synth_shapes
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.synth import SynthOptions, synthesise
from shared.config import Config, load_config
from shared.planning.machine import load_machine
from shared.planning.plan import make_plan

ROOT = Path(__file__).parents[4]
# Enough to drown what an interpreter allocates meanwhile: 70 MB of dense weights, nearly all in layers.
WIDTH = synth_shapes.Width(8192, 512, 1024, 8, 512, 1024, 2, 1024, 32, 16, 64, 16, 256, 2, 1, 4, 2)
SLACK = 24 << 20
CONTEXT = 64

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
model = Model.load(index, config, int(sys.argv[2]))
print(json.dumps({"peak": status("VmHWM") - before, "kept": status("VmRSS") - before}))
"""


def planned(config: Config) -> dict[str, int]:
    """The plan's parts by the first words of their names."""
    machine = load_machine(ROOT / "configs" / "machines" / "spark.toml")
    plan = make_plan(config, ModelConfig.from_dir(config.model.path), machine)
    return {part.name.split(",")[0]: part.nbytes for part in plan.parts}


def weights(parts: dict[str, int]) -> int:
    return sum(nbytes for name, nbytes in parts.items() if name.startswith(("dense weights", "rope tables")))


def tensors_of(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached through lists and the worker's objects, once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_of(part, seen)
    elif type(thing).__module__.startswith("services.worker.model") and hasattr(thing, "__dict__"):
        for part in vars(thing).values():
            yield from tensors_of(part, seen)


def test_the_demo_takes_what_the_plan_says() -> None:
    config = load_config(ROOT / "configs" / "demo.toml")
    model_config = ModelConfig.from_dir(config.model.path)
    context = config.model.max_context
    model = Model.load(TensorIndex.open(config.model.path), model_config, context)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(model, set())}
    parts = planned(config)
    assert sum(storages.values()) == weights(parts)
    assert model.new_state(context).nbytes == parts["state of one sequence"]


def test_a_load_never_holds_the_weights_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synth_shapes.WIDTHS, "wide", WIDTH)
    checkpoint = tmp_path / "checkpoint"
    synthesise(checkpoint, SynthOptions("wide"))
    (tmp_path / "c.toml").write_text(
        f'[run]\nname = "memory"\n[model]\npath = "{checkpoint}"\nmax_context = {CONTEXT}\n[worker]\ndevice = "cpu"\n'
    )
    wanted = weights(planned(load_config(tmp_path / "c.toml")))
    dense = [info.nbytes for name, info in TensorIndex.open(checkpoint).tensors.items() if ".experts." not in name]
    assert sum(dense) > max(dense) + 2 * SLACK, "a second copy of what is stored would show"
    # What is freed goes back at once, else the allocator's own reserve is measured too (mallopt(3)).
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", LOAD, checkpoint, str(CONTEXT)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    memory = json.loads(run.stdout)
    assert wanted - SLACK < memory["kept"] < wanted + SLACK
    assert memory["peak"] < wanted + max(dense) + SLACK
