"""Mistakes in router, experts, hyper-connections, head, the extra block, and in linears and quantisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import kernels
from helpers import op_goldens
from helpers.faults import (
    GEMM,
    HEAD,
    STRUCTURE_MTP,
    SWIGLU,
    Fault,
    Inject,
    all_of,
    attention_half,
    expert_half,
    operation,
    replacing,
    replacing_method,
    structure,
)
from helpers.faults_attention import fp8_with_exact_scale
from kernels.reference import fp8 as act_quant_module
from kernels.reference import gemm as gemm_module
from services.worker.model.assignment import Assignment
from services.worker.model.moe import MoE
from services.worker.model.separate import SHARED, Job, SeparateExperts
from services.worker.model.weights import WeightReader

Op = Callable[..., Any]


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 cut to ten mantissa bits."""
    return ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _weight_after_w2() -> Inject:
    def add(right: Op) -> Op:
        def weighted(self: Any, total: torch.Tensor, expert: int, y: torch.Tensor) -> None:
            right(self, total, expert, (y.float() * self.weights(expert).unsqueeze(-1)).to(y.dtype))

        return weighted

    return all_of(_UNWEIGHTED, _method(Assignment, "add", add))


def _swiglu(changed: Callable[..., torch.Tensor]) -> Inject:
    """`changed(swiglu, is_shared, gate, up, limit, weights, dtype)`, once for each expert."""
    is_shared = [False]

    def one_by_one(right: Op) -> Op:
        def together(self: Any, jobs: Sequence[Job]) -> dict[int, torch.Tensor]:
            outputs: dict[int, torch.Tensor] = {}
            for job in jobs:
                is_shared[0] = job.expert == SHARED
                outputs |= right(self, [job])
            return outputs

        return together

    def activation(right: Op) -> Op:
        return lambda *arguments: changed(right, is_shared[0], *arguments)

    return all_of(_method(SeparateExperts, "_together", one_by_one), replacing("swiglu", activation))


def _without_limit(of_shared: bool) -> Inject:
    return _swiglu(
        lambda right, shared, g, u, limit, *rest: right(g, u, torch.inf if shared == of_shared else limit, *rest)
    )


def _both_sides(right: Op, gate: torch.Tensor, up: torch.Tensor, limit: float, *rest: Any) -> torch.Tensor:
    result: torch.Tensor = right(gate.clamp(-limit, limit), up, limit, *rest)
    return result


def _swapped_nibbles(right: Op) -> Op:
    def linears(products: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        result: list[torch.Tensor] = right([(x, w >> 4 | w << 4, scale) for x, w, scale in products])
        return result

    return linears


def _bias_in_weights(right: Op) -> Op:
    def route(self: Any, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = right(self, x, token_ids)
        if self.bias is None:
            return ids, weights
        biased = kernels.router_scores(x, self.gate) + self.bias
        return ids, kernels.topk_weights(biased, ids, self._config.routed_scaling_factor)

    return route


def _hash_layers_score(right: Op) -> Op:
    def route(self: Any, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tid2eid is None:
            ids, weights = right(self, x, token_ids)
            return ids, weights
        scores = kernels.router_scores(x, self.gate)
        ids = scores.topk(self._config.num_experts_per_tok).indices
        return ids, kernels.topk_weights(scores, ids, self._config.routed_scaling_factor)

    return route


def _sinkhorn(iterations: int) -> Inject:
    def make(right: Op) -> Op:
        return lambda mixes, scale, base, n, _, eps: right(mixes, scale, base, n, iterations, eps)

    return replacing("hc_split_sinkhorn", make)


def _half_post(right: Op) -> Op:
    def split(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pre, post, comb = right(*arguments)
        return pre, post / 2, comb

    return split


def _renamed(**names: str) -> Inject:
    """Weights of the extra block read under another name; `name="other"`, both without the prefix mtp.0."""

    def make(right: Op) -> Op:
        def float32(self: Any, name: str) -> torch.Tensor:
            short = name.removeprefix("mtp.0.").replace(".", "_")
            result: torch.Tensor = right(self, names.get(short, name) if name.startswith("mtp.0.") else name)
            return result

        return float32

    return _method(WeightReader, "float32", make)


_method = replacing_method


def _unnormed_streams(right: Op) -> Op:
    """Only the extra block normalises whole streams, three dimensions."""
    return lambda x, *rest: x if x.dim() == 3 else right(x, *rest)


def _bf16_accumulator(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The sum over blocks of 128 is kept in bfloat16."""
    total = torch.zeros(len(x), len(w), dtype=torch.bfloat16)
    for begin in range(0, x.shape[1], 128):
        total += (x[:, begin : begin + 128] @ w[:, begin : begin + 128].T).bfloat16()
    return total


def _ties_away(right: Op) -> Op:
    """FP4 ties go to the larger magnitude."""
    return lambda x, block=32: right((x.float() * 1.001).to(torch.float32), block).to(x.dtype)


def _scale_of_next_power(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """A scale that already is a power of two is doubled too."""
    return torch.exp2(torch.floor(torch.log2(x / divisor)) + 1)


def _linear_module(patch: Any) -> None:
    patch.setattr(gemm_module.F, "linear", _bf16_accumulator)


_UNWEIGHTED = replacing("swiglu", lambda right: lambda g, u, limit, w, dtype: right(g, u, limit, None, dtype))
ROUTED = expert_half(3)
SHORT = structure(5, 8)
FAULTS = (
    Fault(
        "TF32 in hyper-connections",
        replacing("hc_mixes", lambda right: lambda h, fn, eps: right(_tf32(h), _tf32(fn), eps)),
        structure(129, 8),
    ),
    Fault("weight after w2", _weight_after_w2(), ROUTED),
    Fault("no shared clamp", _without_limit(of_shared=True), SWIGLU),
    Fault("no routed clamp", _without_limit(of_shared=False), SWIGLU),
    Fault("gate clamped both sides", replacing("swiglu", lambda right: partial(_both_sides, right)), SWIGLU),
    Fault("nibbles swapped", replacing("fp4_linears", _swapped_nibbles), SHORT),
    Fault("no routing weight", _UNWEIGHTED, SHORT),
    Fault("no routed scaling factor", replacing("topk_weights", lambda right: lambda s, i, _: right(s, i, 1.0)), SHORT),
    Fault(
        "weights not normalised",
        replacing("topk_weights", lambda right: lambda s, i, scaling: s.gather(-1, i) * scaling),
        SHORT,
    ),
    Fault("bias used in weights", _method(MoE, "route", _bias_in_weights), ROUTED),
    Fault(
        "bias not used for selection",
        replacing("route_by_score", lambda right: lambda scores, bias, topk: right(scores, bias * 0, topk)),
        structure(33, 8),
    ),
    Fault("softplus without sqrt", replacing("router_scores", lambda right: lambda *a: right(*a).square()), SHORT),
    Fault("hash layers use top-k", _method(MoE, "route", _hash_layers_score), SHORT),
    Fault(
        "no shared expert",
        _swiglu(lambda right, shared, *rest: right(*rest) * (not shared)),
        SHORT,
    ),
    Fault(
        "comb transposed",
        replacing("hc_post", lambda right: lambda x, h, post, comb: right(x, h, post, comb.transpose(1, 2))),
        SHORT,
    ),
    Fault("post without factor 2", replacing("hc_split_sinkhorn", _half_post), SHORT),
    Fault("sinkhorn 19 iterations", _sinkhorn(19), operation(op_goldens.check_sinkhorn)),
    Fault("sinkhorn 19 iterations, in the model", _sinkhorn(19), structure(129, 8)),
    Fault("sinkhorn 3 iterations", _sinkhorn(3), SHORT),
    Fault(
        "hc_head = plain mean", replacing("hc_head_weights", lambda right: lambda m, *_: torch.full_like(m, 0.25)), HEAD
    ),
    Fault(
        "no activation quantisation",
        replacing("act_round", lambda right: lambda x, block=128: x.float()),
        expert_half(0),
    ),
    Fault(
        "linear act scale not a power of two",
        replacing("act_round", lambda right: lambda x, block=128: fp8_with_exact_scale(x, block)),
        attention_half(0),
    ),
    Fault(
        "MTP: enorm and hnorm swapped",
        _renamed(enorm_weight="mtp.0.hnorm.weight", hnorm_weight="mtp.0.enorm.weight"),
        STRUCTURE_MTP,
        reload=True,
    ),
    Fault(
        "MTP: uses main norm and hc_head",
        _renamed(norm_weight="norm.weight", **{f"hc_head_{p}": f"hc_head_{p}" for p in ("fn", "base", "scale")}),
        STRUCTURE_MTP,
        reload=True,
    ),
    Fault("MTP: h_proj on unnormed h", replacing("rms_norm", _unnormed_streams), STRUCTURE_MTP),
    Fault("gemm: bf16 accumulator", _linear_module, GEMM),
    Fault("fp4: ties away from zero", replacing("fp4_simulate", _ties_away), operation(op_goldens.check_fp4_simulate)),
    Fault(
        "act_quant: exact powers of two doubled",
        lambda patch: patch.setattr(act_quant_module, "ceil_power_of_two", _scale_of_next_power),
        operation(op_goldens.check_act_quant),
    ),
    Fault(
        "Hadamard without its factor",
        replacing("hadamard", lambda right: lambda x: (right(x).float() * x.shape[-1] ** 0.5).to(x.dtype)),
        operation(op_goldens.check_hadamard),
    ),
)
