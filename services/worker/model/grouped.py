"""Experts computed a wave at a time, for a GPU: one launch for each stage of all experts that are there.

A row's bits depend neither on the other rows nor on which experts go together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

import kernels
from services.worker.model.precision import Precision
from shared.checkpoint.config import ModelConfig


class GroupedExperts:
    """The sum of one batch's experts, as their records come; the same use as `SeparateExperts`.

    quantised: [m, hidden] as `Precision.activations` leaves it; topk_ids int64 and topk_weights float32: [m, k], an
    expert at most once in a row; shared: prepared w1, w3 and w2 of the shared expert.
    """

    def __init__(
        self,
        quantised: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        shared: Sequence[torch.Tensor],
        config: ModelConfig,
        precision: Precision,
    ) -> None:
        m, k = topk_ids.shape
        ids, order = topk_ids.flatten().sort(stable=True)
        places = torch.empty(m * k, dtype=torch.int32, device=ids.device)
        places[order] = torch.arange(m * k, dtype=torch.int32, device=ids.device)
        self._quantised = quantised
        self._width = config.moe_intermediate_size
        self._limit = config.swiglu_limit
        self._precision = precision
        self._tokens = (order // k).int()
        self._routing = topk_weights.flatten()[order]
        self._rows = torch.empty(m * k, quantised.shape[-1], dtype=precision.dtype, device=ids.device)
        # A token's places in ascending order are its experts in ascending order.
        self._places = places.view(m, k).sort(dim=1).values
        self._shared = self._shared_expert(*shared)
        self._spans = _spans(ids)

    @property
    def experts(self) -> Sequence[int]:
        """The distinct experts, ascending."""
        return list(self._spans)

    def compute(self, records: Mapping[int, torch.Tensor]) -> None:
        """Begin with the experts whose records these are."""
        experts = [kernels.ExpertRows(record, *self._spans[expert]) for expert, record in records.items()]
        kernels.expert_mlp(self._quantised, self._tokens, self._routing, experts, self._width, self._limit, self._rows)

    def end_wave(self, experts: Sequence[int]) -> None:
        """Every one of `experts` was computed, and is finished when this returns: the records may become something
        else."""
        if self._rows.is_cuda:
            torch.cuda.current_stream(self._rows.device).synchronize()

    def result(self) -> torch.Tensor:
        """[m, hidden] in the type of values between operations."""
        return kernels.expert_sum(self._rows, self._places, self._shared)

    def _shared_expert(self, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        gate, up = (self._precision.linear(self._quantised, weight) for weight in (w1, w3))
        hidden = kernels.swiglu(gate, up, self._limit, None, self._precision.dtype)
        return self._precision.linear(self._precision.activations(hidden), w2)


def _spans(ids: torch.Tensor) -> dict[int, tuple[int, int]]:
    """Where each distinct value of the sorted `ids` begins and ends, ascending."""
    experts, counts = (t.tolist() for t in torch.unique_consecutive(ids, return_counts=True))
    ends = list(itertools.accumulate(counts))
    return {expert: (end - count, end) for expert, count, end in zip(experts, counts, ends, strict=True)}
