"""The host's part in decoding beside a stand-in for the GPU: whatever it waits for, it serves the GPU's tickets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from services.worker.decode import decoder as decoder_module
from services.worker.decode.decoder import Decoder
from services.worker.decode.tickets import Tickets
from services.worker.sampler import GREEDY


class Gpu:
    """Runs steps in order. Each waits for an expert that only the host's thread asks for; to block on it is to hang."""

    def __init__(self) -> None:
        self.launched = self.done = 0
        self.captured: list[str] = []

    def answer(self) -> None:
        self.done += self.done < self.launched

    def synchronize(self, device: object = None) -> None:
        assert self.done == self.launched, "the host waits for a step that waits for the host"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """In place of torch's; the decoder's tensors and kernels are left out."""
    gpu = Gpu()

    class Graph:
        name = ""

        def replay(self) -> None:
            gpu.launched += self.name == "forward"

    class Capture:
        def __init__(self, graph: Graph, stream: object) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            gpu.synchronize()

        def __exit__(self, *error: object) -> None:
            self.graph.name = gpu.captured[-1]

    class Event:
        def record(self) -> None:
            self.after = gpu.launched

        def query(self) -> bool:
            return gpu.done >= self.after

    class Step:
        def __init__(self, *arguments: object) -> None: ...

        def forward(self) -> None:
            gpu.captured.append("forward")

        def draw(self) -> None:
            gpu.captured.append("draw")

    buffers = MagicMock(own=torch.zeros(3, dtype=torch.int64), waited=torch.zeros(1, dtype=torch.uint32))
    for name, value in {"CUDAGraph": Graph, "graph": Capture, "Event": Event, "Stream": MagicMock()}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    for name in ("join", "StepWeights", "Control"):
        monkeypatch.setattr(decoder_module, name, MagicMock())
    monkeypatch.setattr(decoder_module, "Buffers", lambda *arguments: buffers)
    monkeypatch.setattr(decoder_module, "DecodeStep", Step)
    monkeypatch.setattr(Tickets, "serve", lambda self: gpu.answer())
    return gpu


def opened(position: int) -> Decoder:
    config = SimpleNamespace(num_experts_per_tok=1, num_moe_layers=1, n_routed_experts=1)
    model: Any = SimpleNamespace(config=config, device=torch.device("cpu"))
    states: Any = [SimpleNamespace(position=position, max_context=8192)]
    control = SimpleNamespace(worker_clock=0, ticket_head=0, uses=np.zeros((1, 1)), abort=False)
    decoder = Decoder(model, states)
    decoder.begin(MagicMock(control=control, wave_experts=1))
    return decoder


@pytest.mark.parametrize("position", [100, 2030])
@pytest.mark.parametrize("lookahead", [True, False])
def test_steps_that_miss_end_within_a_graph_and_where_the_next_is_captured(
    gpu: Gpu, position: int, lookahead: bool
) -> None:
    """The second graph is for positions from 2,048 on, and its capture blocks the host."""
    decoder = opened(position)
    assert len(list(decoder.tokens(MagicMock(), [GREEDY], 40, lookahead))) == 40
    assert gpu.done == gpu.launched == 39
    assert gpu.captured == ["forward", "draw"] * (1 if position == 100 else 2)


def test_a_request_that_ends_early_waits_for_its_step_ahead(gpu: Gpu) -> None:
    tokens = opened(100).tokens(MagicMock(), [GREEDY], 40)
    next(tokens)
    assert gpu.launched > gpu.done
    tokens.close()
    assert gpu.launched == gpu.done == 1
