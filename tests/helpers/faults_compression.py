"""Mistakes in compressed entries and in the indexer: pooling, positions, visibility, groups carried over, choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kernels
from helpers.faults import Fault, Inject, attention_half, replacing, replacing_method, structure
from services.worker.model import attention as attention_module
from services.worker.model.compression import Compressor

Op = Callable[..., Any]
Step = Callable[[Op, Compressor, torch.Tensor, Any, int, Any], Any]


def _step(changed: Step) -> Inject:
    """`changed(step, self, projected, state, position, precision)`."""
    return replacing_method(Compressor, "step", lambda right: lambda self, *rest: changed(right, self, *rest))


def _biases(changed: Callable[[Op, Compressor, int, int], torch.Tensor]) -> Inject:
    return replacing_method(Compressor, "_biases", lambda right: lambda self, *rest: changed(right, self, *rest))


def _no_bias_in_prefill(right: Op, self: Any, position: int, m: int) -> torch.Tensor:
    return right(self, position, m) * (m == 1)


def _swapped_halves(right: Op) -> Op:
    def compress(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        half = kv.shape[-1] // 2
        return right(kv.roll(half, -1), gate.roll(half, -1))

    return compress


def _shifted(self: Any, by: int, step: Callable[[], Any]) -> Any:
    """Runs `step` with entries rotated as if they lay `by` positions further."""
    rotations = self._rotations
    self._rotations = rotations[by:]
    try:
        return step()
    finally:
        self._rotations = rotations


def _rope_at_index(right: Op) -> Op:
    def entries(self: Any, pooled: torch.Tensor, first: int) -> torch.Tensor:
        normed = kernels.rms_norm(pooled, self.norm, self._eps)
        return kernels.rope(normed, self._rotations[first : first + len(pooled)])

    return entries


def _forgets(previous: bool) -> Step:
    """What a prefill leaves of the group being filled, or of the one before it, is lost."""

    def step(right: Op, self: Any, projected: torch.Tensor, state: Any, position: int, precision: Any) -> Any:
        result = right(self, projected, state, position, precision)
        start = state.rows.shape[1] - self.ratio
        lost = state.rows[:, :start] if previous else state.rows[:, start:]
        if len(projected) > 1:
            lost[0], lost[1] = 0, -torch.inf
        return result

    return step


def _never_shifts(right: Op, self: Any, projected: torch.Tensor, state: Any, position: int, precision: Any) -> Any:
    """Decoding keeps the group before the prefill's end as the previous one for ever."""
    start = state.rows.shape[1] - self.ratio
    before = state.rows[:, :start].clone()
    result = right(self, projected, state, position, precision)
    if len(projected) == 1:
        state.rows[:, :start] = before
    return result


def _visible(changed: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> Inject:
    """`changed(mask, tokens until the entry closes, ratio)`: 0 is the token that closes it, 1 the one before."""

    def make(right: Op) -> Op:
        def visible(position: int, m: int, ratio: int, device: torch.device) -> torch.Tensor:
            mask = right(position, m, ratio, device)
            ends = (torch.arange(mask.shape[1]) + 1) * ratio
            return changed(mask, ends - 1 - torch.arange(position, position + m).unsqueeze(1), ratio)

        return visible

    return lambda patch: patch.setattr(attention_module, "_visible_entries", make(attention_module._visible_entries))


def _index_without_rope(right: Op) -> Op:
    """In this checkpoint only the indexer's vectors are as wide as the rotated part."""

    def rope(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        return x if x.shape[-1] == 2 * rotation.shape[-1] else right(x, rotation, inverse=inverse)

    return rope


def _no_relu(right: Op) -> Op:
    def scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.einsum("mhd,td,mh->mt", q.float(), k.float(), weights.float())

    return scores


def _choice(changed: Callable[[Op, torch.Tensor, torch.Tensor, int], torch.Tensor]) -> Inject:
    """`changed(index_topk, scores, visible, topk)`."""
    return replacing("index_topk", lambda right: lambda *arguments: changed(right, *arguments))


def _recent(right: Op, scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    return right(torch.arange(scores.shape[-1]).float().expand_as(scores), visible, topk)


RATIO_4 = attention_half(2)
FEW = structure(33, 8)
CHOOSING = structure(127, 8)
FAULTS = (
    Fault("overlap halves swapped", replacing("compress_overlapping", _swapped_halves), FEW),
    Fault(
        "compressor bf16 matmul", _step(lambda right, self, x, *rest: right(self, x.bfloat16().float(), *rest)), RATIO_4
    ),
    Fault("no APE", _biases(lambda right, *rest: right(*rest) * 0), FEW),
    Fault("APE rows off by one", _biases(lambda right, self, position, m: right(self, position + 1, m)), FEW),
    Fault("APE in decode only", _biases(_no_bias_in_prefill), FEW),
    Fault(
        "entry rope at last token",
        _step(lambda right, self, *rest: _shifted(self, self.ratio - 1, lambda: right(self, *rest))),
        FEW,
    ),
    Fault("entry rope at entry index", replacing_method(Compressor, "_entries", _rope_at_index), FEW),
    Fault(
        "entry rope +1 in decode only",
        _step(lambda right, self, x, *rest: _shifted(self, int(len(x) == 1), lambda: right(self, x, *rest))),
        FEW,
    ),
    Fault("partial group lost at prefill end", _step(_forgets(previous=False)), FEW),
    Fault("previous group lost at prefill end", _step(_forgets(previous=True)), FEW),
    Fault("previous group never shifted in decode", _step(_never_shifts), FEW),
    Fault("entry visible one token late", _visible(lambda mask, left, ratio: mask & (left < 0)), FEW),
    Fault(
        "entry visible late, ratio 128 only",
        _visible(lambda mask, left, ratio: mask & (left < 0) if ratio == 128 else mask),
        structure(128, 8),
    ),
    Fault(
        "entry visible one token early (prefill)",
        _visible(lambda mask, left, ratio: mask | (left == 1)),
        FEW,
    ),
    Fault("indexer: no Hadamard", replacing("hadamard_fp4", lambda right: kernels.fp4_simulate), RATIO_4),
    Fault("indexer: no fp4", replacing("hadamard_fp4", lambda right: kernels.hadamard), RATIO_4),
    Fault("indexer: no relu", replacing("index_scores", _no_relu), CHOOSING),
    Fault("indexer: topk -1", _choice(lambda right, scores, visible, topk: right(scores, visible, topk - 1)), CHOOSING),
    Fault("indexer: ignored", _choice(lambda right, scores, visible, topk: visible), CHOOSING),
    Fault("indexer: most recent entries instead", _choice(_recent), CHOOSING),
    Fault("indexer: no rope", replacing("rope", _index_without_rope), CHOOSING),
)
