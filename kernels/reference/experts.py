"""The routed experts' MLPs on the rows of a batch that chose them, and their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.reference.activation import swiglu
from kernels.reference.dequant import FP4_BLOCK
from kernels.reference.fp8 import act_round
from kernels.reference.gemm import fp4_linear


class ExpertRows(NamedTuple):
    """An expert's rows, `begin` to `end` of a list that is sorted by expert.

    record: uint8 [>= record bytes]: w1, w1.scale, w3, w3.scale, w2, w2.scale; e2m1 codes, two a byte, and exponents.
    """

    record: torch.Tensor
    begin: int
    end: int


def expert_mlp(
    x: torch.Tensor,
    tokens: torch.Tensor,
    routing: torch.Tensor,
    experts: Sequence[ExpertRows],
    width: int,
    limit: float,
    out: torch.Tensor,
) -> None:
    """Fill the experts' rows of `out` [rows, hidden] with w2 (silu(w1 x) * (w3 x) * routing), clamped as in `swiglu`.

    x: [m, hidden] as `act_round` leaves it; tokens: int32 [rows], the row of x that each row takes; routing: float32
    [rows]; width: that of w1 and w3. What goes between the products is rounded to the type of `out`.
    """
    hidden = x.shape[-1]
    for expert in experts:
        w1, w3, w2 = _weights(expert.record, hidden, width)
        rows = slice(expert.begin, expert.end)
        taken = x[tokens[rows].long()].float()
        gate, up = fp4_linear(taken, *w1).type(out.dtype), fp4_linear(taken, *w3).type(out.dtype)
        inner = act_round(swiglu(gate, up, limit, routing[rows], out.dtype)).float()
        out[rows] = fp4_linear(inner, *w2).type(out.dtype)


def expert_sum(rows: torch.Tensor, places: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows in the order of `places`, then of `shared`; in float32, rounded once.

    rows: [n, hidden]; places: int32 [m, topk]; shared: [m, hidden]; returns [m, hidden] in the type of shared.
    """
    total = torch.zeros_like(shared, dtype=torch.float32)
    for place in places.long().unbind(1):
        total += rows[place]
    return (total + shared).type(shared.dtype)


def _weights(record: torch.Tensor, hidden: int, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of w1, w3 and w2; each is as many values."""
    codes, scales = hidden * width // 2, hidden * width // FP4_BLOCK
    parts = record[: 3 * (codes + scales)].split([codes, scales] * 3)
    return list(zip(parts[::2], parts[1::2], strict=True))
