"""The expert half of a layer: route, look up, compute what is there, wait for the rest, sum in a fixed order.

Each expert is computed alone on its own tokens and the sum goes by expert id, so cache, hits and waves change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

import kernels
from services.worker.experts import ExpertProvider
from services.worker.model.precision import Precision
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout

# Experts of one look-up in prefill: enough reads at once to keep a drive busy, few enough that computing starts early.
WAVE = 32


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
        self._shared_w1_w3 = reader.linears(f"{prefix}shared_experts.w1", f"{prefix}shared_experts.w3")
        self._shared_w2 = reader.linear(f"{prefix}shared_experts.w2")

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
        topk_ids, topk_weights = self.route(x, token_ids)
        quantised = self._precision.activations(x)
        shared = None
        total = torch.zeros(x.shape, dtype=torch.float32)
        waves = _waves(topk_ids, min(experts.wave_experts, WAVE))
        for number, wave in enumerate(waves):
            ahead = waves[number + 1] if number + 1 < len(waves) else ()
            look_up = experts.look_up(self._layer, wave, ahead)
            if shared is None:
                shared = self._shared(quantised)
            outputs = dict(self._outputs(look_up.hits, quantised, topk_ids, topk_weights))
            outputs |= self._outputs(look_up.wait(), quantised, topk_ids, topk_weights)
            look_up.done()
            for expert in wave:
                tokens, y = outputs[expert]
                total.index_add_(0, tokens, y.to(torch.float32))
        assert shared is not None
        return (total + shared.to(torch.float32)).to(self._precision.dtype)

    def _shared(self, quantised: torch.Tensor) -> torch.Tensor:
        return self._mlp(quantised, self._shared_w1_w3, self._shared_w2, None)

    def _outputs(
        self,
        records: Mapping[int, torch.Tensor],
        quantised: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """(expert, (its tokens [t], their outputs [t, hidden])) for each record."""
        for expert, record in records.items():
            tokens, rank = (topk_ids == expert).nonzero(as_tuple=True)
            w1_w3, w2 = self._weights(record)
            yield expert, (tokens, self._mlp(quantised[tokens], w1_w3, w2, topk_weights[tokens, rank]))

    def _weights(self, record: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The record's weights in float32: w1 above w3 [2 * width, hidden], and w2 [hidden, width]."""
        parts = [record.narrow(0, p.offset, p.nbytes).view(p.shape) for p in self._layout.parts]
        w1, w3, w2 = (
            kernels.dequant_fp4(weight, scale.view(torch.float8_e8m0fnu))
            for weight, scale in zip(parts[::2], parts[1::2], strict=True)
        )
        return torch.cat((w1, w3)), w2

    def _mlp(
        self, quantised: torch.Tensor, w1_w3: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        dtype = self._precision.dtype
        gate, up = F.linear(quantised, w1_w3).to(dtype).chunk(2, -1)
        hidden = kernels.swiglu(gate, up, self._config.swiglu_limit, weights, dtype)
        return F.linear(self._precision.activations(hidden), w2).to(dtype)


def _waves(topk_ids: torch.Tensor, size: int) -> list[Sequence[int]]:
    """The distinct experts in ascending order, cut into look-ups."""
    ids = sorted(set(topk_ids.flatten().tolist()))
    return [ids[begin : begin + size] for begin in range(0, len(ids), size)]
