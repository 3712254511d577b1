"""What a rehearsal finds is all that warming up needs, and it changes nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tilelang
import torch
from helpers.resident import ResidentExperts

from kernels.tile import KERNELS
from services.worker.engine import Engine
from services.worker.model import Model
from services.worker.warm_up import compile_ahead, warm_up
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex

pytestmark = pytest.mark.timeout(600)  # compilers, where nothing is compiled yet
DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
CONTEXT = 9000
"""More than one extent of decode steps."""


def test_everything_is_compiled_ahead_and_nothing_by_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    index, config = TensorIndex.open(DEMO), ModelConfig.from_dir(DEMO)
    model = Model.load(index, config, CONTEXT, device=torch.device("cuda"))
    engine, experts, ids = Engine(model, CONTEXT, 512), ResidentExperts(index, config), list(range(3, 300))
    decoder = engine.decoder
    assert decoder is not None
    expected = model.forward(engine.state, ids, experts).clone()
    engine.state.reset()
    for kernel in KERNELS:
        kernel._compiled.cache_clear()
    compilers: list[threading.Thread] = []
    compile_one, said, seconds = tilelang.compile, list[str](), list[float]()

    def noting(*args: Any, **kwargs: Any) -> Any:
        compilers.append(threading.current_thread())
        return compile_one(*args, **kwargs)

    def run() -> None:
        started = time.perf_counter()
        warm_up(model, engine.state, engine.prefill_chunk)
        decoder.warm_up()
        seconds.append(time.perf_counter() - started)

    monkeypatch.setattr(tilelang, "compile", noting)
    started = time.perf_counter()
    compile_ahead(run, said.append)
    print(f"{said[-1]}: {time.perf_counter() - started:.1f} s, of these rehearsal and run {seconds}")
    assert said[-1] == f"compiling kernels: {len(compilers)} of {len(compilers)}"
    assert len(compilers) > 40
    assert threading.current_thread() not in compilers
    assert model.forward(engine.state, ids, experts).equal(expected)
    experts.close()
