"""The expert half of a layer: route, look up, compute what is there, wait for the rest, sum in a fixed order.

Each expert is computed alone on its own tokens and the sum goes by expert id, so cache, hits and waves change no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

import kernels
from services.worker.experts import ExpertProvider
from services.worker.model.assignment import Assignment
from services.worker.model.precision import Precision
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout

# Experts of one look-up in prefill: enough reads at once to keep a drive busy, few enough that computing starts early.
WAVE = 32

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


class MoE:
    """Router and shared expert of one layer; routed experts come from the provider."""

    def __init__(
        self, reader: WeightReader, prefix: str, config: ModelConfig, layer: int, precision: Precision
    ) -> None:
        self._config = config
        self._layer = layer
        self._precision = precision
        self._part_sizes = [part.nbytes for part in RecordLayout.of(config).parts]
        self._gate = reader.float32(f"{prefix}gate.weight")
        is_hash = config.is_hash_layer(layer)
        self._tid2eid = reader.stored(f"{prefix}gate.tid2eid") if is_hash else None
        self._bias = None if is_hash else reader.float32(f"{prefix}gate.bias")
        self._following: MoE | None = None
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

    def look_ahead_to(self, following: MoE) -> None:
        """Guess the experts of the next layer while this one computes, unless token ids decide there."""
        if following._bias is not None:
            self._following = following

    def guess(self, x: torch.Tensor) -> list[int]:
        """The experts that this router would choose for an earlier layer's input. x: [1, hidden]."""
        assert self._bias is not None
        scores = kernels.router_scores(x, self._gate)
        chosen: list[int] = kernels.route_by_score(scores, self._bias, self._config.num_experts_per_tok)[0].tolist()
        return chosen

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor, experts: ExpertProvider) -> torch.Tensor:
        """x: [m, hidden] -> [m, hidden]."""
        assignment = Assignment(*self.route(x, token_ids))
        quantised = self._precision.activations(x)
        jobs = [self._shared_job(quantised)]
        total = torch.zeros(x.shape, dtype=torch.float32)
        outputs: dict[int, torch.Tensor] = {}
        waves = _waves(assignment.experts, min(experts.wave_experts, WAVE))
        for number, wave in enumerate(waves):
            ahead = waves[number + 1] if number + 1 < len(waves) else ()
            look_up = experts.look_up(self._layer, wave, ahead)
            if self._following is not None and assignment.is_single:
                experts.guess(self._following._layer, partial(self._following.guess, x))
            jobs += self._jobs(look_up.hits, quantised, assignment)
            outputs |= self._outputs(jobs, assignment)
            outputs |= self._outputs(self._jobs(look_up.wait(), quantised, assignment), assignment)
            look_up.done()
            for expert in wave:
                assignment.add(total, expert, outputs.pop(expert))
            jobs = []
        return total.add_(outputs[SHARED]).type(self._precision.dtype)

    def _shared_job(self, quantised: torch.Tensor) -> Job:
        """The shared expert takes every token as it is."""
        return Job(SHARED, quantised, torch.ones(quantised.shape[0]), *self._shared)

    def _jobs(self, records: Mapping[int, torch.Tensor], quantised: torch.Tensor, assignment: Assignment) -> list[Job]:
        return [
            Job(expert, assignment.rows(quantised, expert), assignment.weights(expert), *self._weights(record))
            for expert, record in records.items()
        ]

    def _weights(self, record: torch.Tensor) -> list[Packed]:
        """A record's w1, w3 and w2."""
        parts = record.split_with_sizes(self._part_sizes)
        return [Packed(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]

    def _outputs(self, jobs: Sequence[Job], assignment: Assignment) -> dict[int, torch.Tensor]:
        """Each job's outputs [t, hidden], weighted. The jobs of a single token go together.

        That saves most of the operations of a decode step. Larger groups would be cut between threads elsewhere than
        alone, which may change a last bit.
        """
        if assignment.is_single:
            return self._together(jobs) if jobs else {}
        return {job.expert: self._together([job])[job.expert] for job in jobs}

    def _together(self, jobs: Sequence[Job]) -> dict[int, torch.Tensor]:
        """What lies between the products is done for all rows at once."""
        dtype, rows = self._precision.dtype, [job.rows for job in jobs]
        inner = _products(rows + rows, [job.w1 for job in jobs] + [job.w3 for job in jobs])
        gate, up = (torch.cat(part).type(dtype) for part in (inner[: len(jobs)], inner[len(jobs) :]))
        routing = torch.cat([job.routing for job in jobs])
        hidden = kernels.swiglu(gate, up, self._config.swiglu_limit, routing, dtype)
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


def _waves(experts: Sequence[int], size: int) -> list[Sequence[int]]:
    """Distinct experts in ascending order, cut into look-ups."""
    return [experts[begin : begin + size] for begin in range(0, len(experts), size)]
