"""Experts computed one by one, for a CPU and for comparisons in float32.

Each expert is computed alone on its own tokens, so which of them come together changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

import kernels
from services.worker.model.assignment import Assignment
from services.worker.model.precision import Precision
from shared.checkpoint.config import ModelConfig

FP4_BLOCK = 32
"""Values of a weight that share a scale."""

SHARED = -1
"""Stands for the shared expert among expert ids."""


class Packed(NamedTuple):
    """A weight as an expert's record holds it: codes uint8 [n * k/2], scales uint8 [n * k/32]."""

    codes: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """An expert and its tokens: quantised rows [t, hidden], routing weights float32 [t].

    The weights are packed, or prepared for the shared expert.
    """

    expert: int
    rows: torch.Tensor
    routing: torch.Tensor
    w1: Packed | torch.Tensor
    w3: Packed | torch.Tensor
    w2: Packed | torch.Tensor


class SeparateExperts:
    """The sum of one batch's experts, as their records come.

    quantised: [m, hidden] as `Precision.activations` leaves it; topk_ids int64 and topk_weights float32: [m, k], an
    expert at most once in a row; shared: prepared w1, w3 and w2 of the shared expert, which takes every token as it is.
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
        self._quantised = quantised
        self._assignment = Assignment(topk_ids, topk_weights)
        self._limit = config.swiglu_limit
        values = config.hidden_size * config.moe_intermediate_size
        self._part_sizes = [values // 2, values // FP4_BLOCK] * 3
        self._precision = precision
        ones = torch.ones(len(quantised), device=quantised.device)
        self._waiting = [Job(SHARED, quantised, ones, *shared)]
        self._outputs: dict[int, torch.Tensor] = {}
        self._total = torch.zeros(quantised.shape, dtype=torch.float32, device=quantised.device)

    @property
    def experts(self) -> Sequence[int]:
        """The distinct experts, ascending."""
        return self._assignment.experts

    def compute(self, records: Mapping[int, torch.Tensor]) -> None:
        """The experts whose records these are; with the first of them the shared expert.

        The jobs of a single token go together, which saves most of the operations of a decode step. Larger groups
        would be cut between threads elsewhere than alone, which may change a last bit.
        """
        jobs = self._waiting + [self._job(expert, record) for expert, record in records.items()]
        self._waiting = []
        if self._assignment.is_single:
            self._outputs |= self._together(jobs) if jobs else {}
        else:
            self._outputs |= {job.expert: self._together([job])[job.expert] for job in jobs}

    def end_wave(self, experts: Sequence[int]) -> None:
        """Every one of `experts`, ascending, was computed; the records may become something else."""
        for expert in experts:
            self._assignment.add(self._total, expert, self._outputs.pop(expert))

    def result(self) -> torch.Tensor:
        """[m, hidden] in the type of values between operations."""
        return self._total.add_(self._outputs[SHARED]).type(self._precision.dtype)

    def _job(self, expert: int, record: torch.Tensor) -> Job:
        parts = record.split_with_sizes(self._part_sizes)
        weights = [Packed(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        rows = self._assignment.rows(self._quantised, expert)
        return Job(expert, rows, self._assignment.weights(expert), *weights)

    def _together(self, jobs: Sequence[Job]) -> dict[int, torch.Tensor]:
        """Each job's outputs [t, hidden], weighted. What lies between the products is done for all rows at once."""
        dtype, rows = self._precision.dtype, [job.rows for job in jobs]
        inner = _products(rows + rows, [job.w1 for job in jobs] + [job.w3 for job in jobs])
        gate, up = (torch.cat(part).type(dtype) for part in (inner[: len(jobs)], inner[len(jobs) :]))
        routing = torch.cat([job.routing for job in jobs])
        hidden = kernels.swiglu(gate, up, self._limit, routing, dtype)
        sizes = [len(x) for x in rows]
        inputs = self._precision.activations(hidden).split_with_sizes(sizes)
        outputs = torch.cat(_products(inputs, [job.w2 for job in jobs])).type(dtype).split_with_sizes(sizes)
        return {job.expert: part for job, part in zip(jobs, outputs, strict=True)}


def _products(rows: Sequence[torch.Tensor], weights: Sequence[Packed | torch.Tensor]) -> list[torch.Tensor]:
    """rows[i] @ weights[i]^T, float32, each as if alone."""
    packed = [(x, *w) for x, w in zip(rows, weights, strict=True) if isinstance(w, Packed)]
    done = iter(kernels.fp4_linears(packed))
    return [
        next(done) if isinstance(w, Packed) else kernels.fp8_linear(x, w, torch.float32)
        for x, w in zip(rows, weights, strict=True)
    ]
