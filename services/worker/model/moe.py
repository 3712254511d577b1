"""The expert half of a layer: route, look up, compute what is there, wait for the rest, sum in a fixed order.

Each expert is computed alone on its own tokens and the sum goes by expert id, so cache, hits and waves change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

import kernels
from services.worker.experts import ExpertProvider
from services.worker.model.assignment import Assignment
from services.worker.model.precision import Precision
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout

# Experts of one look-up in prefill: enough reads at once to keep a drive busy, few enough that computing starts early.
WAVE = 32

Weights = Callable[[int], torch.Tensor]
"""0, 1, 2 -> w1, w3, w2 of an expert, float32."""


class MoE:
    """Router and shared expert of one layer; routed experts come from the provider."""

    def __init__(
        self, reader: WeightReader, prefix: str, config: ModelConfig, layer: int, precision: Precision
    ) -> None:
        self._config = config
        self._layer = layer
        self._precision = precision
        self._layout = RecordLayout.of(config)
        self._gate = reader.float32(f"{prefix}gate.weight")
        is_hash = config.is_hash_layer(layer)
        self._tid2eid = reader.stored(f"{prefix}gate.tid2eid") if is_hash else None
        self._bias = None if is_hash else reader.float32(f"{prefix}gate.bias")
        self._shared = [reader.linear(f"{prefix}shared_experts.{name}") for name in ("w1", "w3", "w2")]

    def hint(self, token_ids: torch.Tensor, experts: ExpertProvider) -> None:
        """Name the experts that these tokens will certainly need here, if the token id alone decides."""
        if self._tid2eid is not None:
            experts.hint(self._layer, sorted(set(self._tid2eid[token_ids].flatten().tolist())))

    def route(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """topk_ids int64 and topk_weights float32, both [m, num_experts_per_tok]. x: [m, hidden]."""
        c = self._config
        scores = kernels.router_scores(x, self._gate)
        if self._tid2eid is not None:
            topk_ids = kernels.route_by_hash(token_ids, self._tid2eid)
        else:
            assert self._bias is not None
            topk_ids = kernels.route_by_score(scores, self._bias, c.num_experts_per_tok)
        return topk_ids, kernels.topk_weights(scores, topk_ids, c.routed_scaling_factor)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        """x: [m, hidden] -> [m, hidden]."""
        assignment = Assignment(*self.route(x, token_ids))
        quantised = self._precision.activations(x)
        shared = None
        total = torch.zeros(x.shape, dtype=torch.float32)
        waves = _waves(assignment.experts, min(experts.wave_experts, WAVE))
        for number, wave in enumerate(waves):
            ahead = waves[number + 1] if number + 1 < len(waves) else ()
            look_up = experts.look_up(self._layer, wave, ahead)
            if shared is None:
                (shared,) = self._mlps([quantised], [self._shared.__getitem__], None)
            outputs = self._outputs(look_up.hits, quantised, assignment)
            outputs |= self._outputs(look_up.wait(), quantised, assignment)
            look_up.done()
            for expert in wave:
                assignment.add(total, expert, outputs[expert])
        assert shared is not None
        return total.add_(shared).to(self._precision.dtype)

    def _outputs(
        self, records: Mapping[int, torch.Tensor], quantised: torch.Tensor, assignment: Assignment
    ) -> dict[int, torch.Tensor]:
        """For each record, its expert's outputs for its tokens [t, hidden], weighted."""
        groups = [list(records)] if assignment.is_single else [[expert] for expert in records]
        outputs: dict[int, torch.Tensor] = {}
        for group in filter(None, groups):
            rows = [assignment.rows(quantised, expert) for expert in group]
            weights = [partial(self._weight, records[expert]) for expert in group]
            outputs |= zip(group, self._mlps(rows, weights, assignment.weights(group)), strict=True)
        return outputs

    def _weight(self, record: torch.Tensor, number: int) -> torch.Tensor:
        """One of w1, w3 [width, hidden] and w2 [hidden, width] of a record, float32."""
        weight, scale = (
            record.narrow(0, part.offset, part.nbytes).view(part.shape)
            for part in self._layout.parts[2 * number : 2 * number + 2]
        )
        return kernels.dequant_fp4(weight, scale.view(torch.float8_e8m0fnu))

    def _mlps(
        self, rows: Sequence[torch.Tensor], weights: Sequence[Weights], routing: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Each expert on its own rows, only what lies between the products on all of them at once.

        For single rows that saves most of the operations; larger groups would be cut between threads elsewhere than
        alone, which may change a last bit. A weight is made just before its use, so that it is still in the cache.
        """
        dtype = self._precision.dtype
        inner = [(F.linear(x, w(0)), F.linear(x, w(1))) for x, w in zip(rows, weights, strict=True)]
        gate, up = (torch.cat(parts).to(dtype) for parts in zip(*inner, strict=True))
        hidden = kernels.swiglu(gate, up, self._config.swiglu_limit, routing, dtype)
        inputs = torch.split(self._precision.activations(hidden), [len(x) for x in rows])
        return [F.linear(x, w(2)).to(dtype) for x, w in zip(inputs, weights, strict=True)]


def _waves(experts: Sequence[int], size: int) -> list[Sequence[int]]:
    """Distinct experts in ascending order, cut into look-ups."""
    return [experts[begin : begin + size] for begin in range(0, len(experts), size)]
