"""The expert half of a layer: route, look up, compute what is there, wait for the rest, sum in a fixed order.

What an expert gives does not depend on its company and the sum goes by expert id, so cache, hits and waves change no
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

import kernels
from services.worker.experts import ExpertProvider
from services.worker.model.grouped import GroupedExperts
from services.worker.model.precision import Precision
from services.worker.model.separate import SeparateExperts
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig

# Experts of one look-up in prefill: enough reads at once to keep a drive busy, few enough that computing starts early.
WAVE = 32


class Batch(Protocol):
    """A batch of tokens and their experts, whose records come in waves."""

    @property
    def experts(self) -> Sequence[int]:
        """The distinct experts, ascending."""

    def compute(self, records: Mapping[int, torch.Tensor]) -> None:
        """Begin with the experts whose records these are."""

    def end_wave(self, experts: Sequence[int]) -> None:
        """Finish with `experts`, ascending, all of which `compute` was given: their records may become something
        else."""

    def result(self) -> torch.Tensor:
        """The shared expert's and the weighted experts' sum, [m, hidden] in the type of values between operations."""


class MoE:
    """Router and shared expert of one layer; routed experts come from the provider."""

    def __init__(
        self, reader: WeightReader, prefix: str, config: ModelConfig, layer: int, precision: Precision
    ) -> None:
        self._config = config
        self._layer = layer
        self._precision = precision
        self.gate = reader.matrix(f"{prefix}gate.weight")
        is_hash = config.is_hash_layer(layer)
        self.tid2eid = reader.expert_ids(f"{prefix}gate.tid2eid", config.n_routed_experts) if is_hash else None
        self.bias = None if is_hash else reader.float32(f"{prefix}gate.bias")
        self._following: MoE | None = None
        self.shared_w1_w3 = reader.linear(f"{prefix}shared_experts.w1", f"{prefix}shared_experts.w3")
        self.shared_w2 = reader.linear(f"{prefix}shared_experts.w2")
        width = config.moe_intermediate_size * config.n_shared_experts
        self._shared = [self.shared_w1_w3[:width], self.shared_w1_w3[width:], self.shared_w2]

    def hint(self, token_ids: torch.Tensor, experts: ExpertProvider) -> None:
        """Name the experts that these tokens will certainly need here, if the token id alone decides."""
        if self.tid2eid is not None:
            experts.hint(self._layer, sorted(set(self.tid2eid[token_ids].flatten().tolist())))

    def route(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """topk_ids int64 and topk_weights float32, both [m, num_experts_per_tok]. x: [m, hidden]."""
        c = self._config
        scores = kernels.router_scores(x, self.gate)
        if self.tid2eid is not None:
            topk_ids = kernels.route_by_hash(token_ids, self.tid2eid)
        else:
            assert self.bias is not None
            topk_ids = kernels.route_by_score(scores, self.bias, c.num_experts_per_tok)
        return topk_ids, kernels.topk_weights(scores, topk_ids, c.routed_scaling_factor)

    def look_ahead_to(self, following: MoE) -> None:
        """Guess the experts of the next layer while this one computes, unless token ids decide there."""
        if following.bias is not None:
            self._following = following

    def guess(self, x: torch.Tensor) -> list[int]:
        """The experts that this router would choose for an earlier layer's input. x: [1, hidden]."""
        assert self.bias is not None
        scores = kernels.router_scores(x, self.gate)
        chosen: list[int] = kernels.route_by_score(scores, self.bias, self._config.num_experts_per_tok)[0].tolist()
        return chosen

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        """x: [m, hidden] -> [m, hidden]."""
        batch = self._batch(x, *self.route(x, token_ids))
        waves = _waves(batch.experts, min(experts.wave_experts, WAVE))
        for number, wave in enumerate(waves):
            ahead = waves[number + 1] if number + 1 < len(waves) else ()
            look_up = experts.look_up(self._layer, wave, ahead)
            if self._following is not None and len(x) == 1:
                experts.guess(self._following._layer, partial(self._following.guess, x))
            batch.compute(look_up.hits)
            batch.compute(look_up.wait())
            batch.end_wave(wave)
            look_up.done()
        return batch.result()

    def _batch(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Batch:
        kind = GroupedExperts if x.is_cuda and self._precision.is_quantised else SeparateExperts
        quantised = self._precision.activations(x)
        return kind(quantised, topk_ids, topk_weights, self._shared, self._config, self._precision)


def _waves(experts: Sequence[int], size: int) -> list[Sequence[int]]:
    """Distinct experts in ascending order, cut into look-ups."""
    return [experts[begin : begin + size] for begin in range(0, len(experts), size)]
