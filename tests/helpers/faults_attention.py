"""Mistakes in positions, sink, window, query norm and output projection of attention, and in what its cache keeps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from helpers.faults import Fault, Inject, after_longer, all_of, attention_half, replacing, replacing_method, structure
from kernels.reference import rotary as rope_module
from services.worker.model import model as model_module
from services.worker.model.attention import Attention
from services.worker.model.precision import Precision
from services.worker.model.state import SequenceState
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig

Op = Callable[..., Any]
E4M3_MAX = 448.0


def _inverse(changed: Callable[[Op, torch.Tensor, torch.Tensor], torch.Tensor]) -> Inject:
    """`changed(rope, x, rotation)` instead of the rotation back."""

    def make(right: Op) -> Op:
        return lambda x, r, inverse=False: changed(right, x, r) if inverse else right(x, r)

    return replacing("rope", make)


def _half_split(right: Op) -> Op:
    """Pairs (i, i + 32) instead of (2i, 2i + 1)."""

    def rope(x: torch.Tensor, rotation: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        width = 2 * rotation.shape[-1]
        order = torch.arange(width).view(2, -1).T.flatten()
        plain, turned = x[..., :-width], x[..., -width:]
        turned = right(turned[..., order], rotation, inverse=inverse)[..., order.argsort()]
        return torch.cat((plain, turned), -1)

    return rope


def _sink(changed: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    return replacing("masked_attention", lambda right: lambda q, kv, sink, *rest: right(q, kv, changed(sink), *rest))


def _mscale(right: Op) -> Op:
    """YaRN's magnitude factor, squared, in the layers that YaRN stretches."""

    def attend(self: Any, *arguments: Any) -> torch.Tensor:
        scale = self._scale
        self._scale = scale * (0.1 * math.log(16) + 1) ** 2 if self._ratio else scale
        try:
            return right(self, *arguments)
        finally:
            self._scale = scale

    return attend


def _window(size: int) -> Inject:
    def make(right: Op) -> Op:
        return lambda directory: dataclasses.replace(right(directory), sliding_window=size)

    return replacing_method(ModelConfig, "from_dir", make)


def _unrotated_ring(right: Op) -> Op:
    """After a long prefill the last keys lie from row 0 on, whatever their positions."""

    def attend_many(self: Any, q: Any, kv: torch.Tensor, chosen: Any, state: Any, position: int) -> torch.Tensor:
        output = right(self, q, kv, chosen, state, position)
        if len(kv) >= state.window:
            state.keys[: state.window] = kv[-state.window :]
        return output

    return attend_many


def _simulated_where(compressed: bool) -> Inject:
    """FP8 for keys of one kind only: those of entries, or those of the window."""
    inside: list[bool] = []

    def compress(right: Op) -> Op:
        def noted(*arguments: Any) -> Any:
            inside.append(True)
            try:
                return right(*arguments)
            finally:
                inside.pop()

        return noted

    def simulate(right: Op) -> Op:
        return lambda x, block=64: right(x, block) if bool(inside) == compressed else x

    return all_of(replacing_method(Attention, "_compress", compress), replacing("fp8_simulate", simulate))


def fp8_with_exact_scale(x: torch.Tensor, block: int) -> torch.Tensor:
    """A block's scale is amax / 448 itself, not the power of two above it; float32."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def _project_out(changed: Callable[[torch.Tensor, int], torch.Tensor]) -> Inject:
    """The output projection sees changed(o [m, heads, head_dim], groups)."""

    def make(right: Op) -> Op:
        return lambda self, o: right(self, changed(o, self._config.o_groups))

    return replacing_method(Attention, "_project_out", make)


def _interleaved(o: torch.Tensor, groups: int) -> torch.Tensor:
    return o.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2).contiguous()


def _unweighted(name: str) -> Inject:
    def make(right: Op) -> Op:
        return lambda self, tensor: right(self, tensor).fill_(1) if tensor.endswith(name) else right(self, tensor)

    return replacing_method(WeightReader, "float32", make)


def _yarn(changed: Callable[..., torch.Tensor]) -> Inject:
    return replacing("yarn_frequencies", lambda right: lambda *arguments: changed(right, *arguments))


def _forget_only_the_position(self: Any) -> None:
    self.position = self.extra_position = 0


def _unrounded_range(patch: pytest.MonkeyPatch) -> None:
    same = {"floor": lambda v: v, "ceil": lambda v: v}
    patch.setattr(rope_module, "math", SimpleNamespace(log=math.log, pi=math.pi, **same))


SHORT = structure(5, 8)
WINDOW = structure(33, 8)
FAULTS = (
    Fault("no inverse rope", _inverse(lambda right, x, r: x), SHORT),
    Fault("inverse rope not conjugated", _inverse(lambda right, x, r: right(x, r)), SHORT),
    Fault("rope half-split pairs", replacing("rope", _half_split), SHORT),
    Fault("sink ignored", _sink(lambda sink: torch.full_like(sink, -torch.inf)), SHORT),
    Fault("sink = 0", _sink(torch.zeros_like), SHORT),
    Fault("sink heads rolled", _sink(lambda sink: sink.roll(1)), SHORT),
    Fault("no q head norm", replacing("head_norm", lambda right: lambda q, eps: q), SHORT),
    Fault("YaRN mscale in softmax scale", replacing_method(Attention, "attend", _mscale), WINDOW),
    Fault("window -1", _window(31), WINDOW, reload=True),
    Fault("window +1", _window(33), WINDOW, reload=True),
    Fault("ring not rotated after long prefill", replacing_method(Attention, "_attend_many", _unrotated_ring), WINDOW),
    Fault("wo_a groups: heads interleaved", _project_out(_interleaved), SHORT),
    Fault(
        "wo_a with activation quantisation",
        _project_out(lambda o, groups: kernels.act_round(o.flatten(1)).view(o.shape)),
        attention_half(0),
    ),
    Fault("no kv_norm weight", _unweighted("attn.kv_norm.weight"), SHORT, reload=True),
    Fault(
        "YaRN on ratio-0",
        replacing("rope_frequencies", lambda right: lambda d, base: kernels.yarn_frequencies(d, base, 16, 32, 1, 256)),
        WINDOW,
        reload=True,
    ),
    Fault(
        "compress theta and YaRN on ratio-0",
        replacing_method(model_module._Rotations, "of", lambda right: lambda self, ratio: self._stretched),
        SHORT,
        reload=True,
    ),
    Fault(
        "no YaRN on compressed layers",
        _yarn(lambda right, dim, base, *rest: rope_module.rope_frequencies(dim, base)),
        WINDOW,
        reload=True,
    ),
    Fault(
        "theta 1e4 on compressed layers",
        _yarn(lambda right, dim, base, *rest: right(dim, 10000.0, *rest)),
        WINDOW,
        reload=True,
    ),
    Fault("YaRN range not floored and ceiled", _unrounded_range, WINDOW, reload=True),
    Fault("no KV fp8", replacing("fp8_simulate", lambda right: lambda x, block=64: x), attention_half(0)),
    Fault("no KV fp8 in the window", _simulated_where(compressed=True), attention_half(2)),
    Fault("no KV fp8 in entries", _simulated_where(compressed=False), attention_half(2)),
    Fault(
        "KV fp8 over rope dims too",
        replacing_method(Precision, "cached_key", lambda right: lambda self, kv, rope_dim: right(self, kv, 0)),
        attention_half(0),
    ),
    Fault(
        "KV fp8: scale not a power of two",
        replacing("fp8_simulate", lambda right: lambda x, block=64: fp8_with_exact_scale(x, block).to(x.dtype)),
        attention_half(0),
    ),
    Fault(
        "score state not reset",
        replacing_method(SequenceState, "reset", lambda right: _forget_only_the_position),
        after_longer(1, 8),
    ),
)
