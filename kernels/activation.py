"""The gated activation of the shared expert."""

from typing import Any

import tilelang.language as T
import torch

from kernels.tile import tile_kernel, type_name

_THREADS = 128


@tile_kernel(
    {"width": 2048, "limit": 10.0, "source": "bfloat16", "dtype": "bfloat16"},
    {"width": 128, "limit": 0.5, "source": "float32", "dtype": "float32"},
)
def swiglu_kernel(width: int, limit: float, source: str, dtype: str) -> Any:
    m = T.dynamic("m")

    @T.prim_func
    def swiglu(
        gate: T.Tensor((m, width), source),
        up: T.Tensor((m, width), source),
        weights: T.Tensor((m,), "float32"),
        y: T.Tensor((m, width), dtype),
    ) -> None:
        with T.Kernel(m, threads=_THREADS) as row:
            for i in T.Parallel(width):
                g = T.min(T.cast(gate[row, i], "float32"), T.float32(limit))
                u = T.max(T.min(T.cast(up[row, i], "float32"), T.float32(limit)), T.float32(-limit))
                y[row, i] = T.cast(g / (T.float32(1.0) + T.exp(-g)) * u * weights[row], dtype)

    return swiglu


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """See `kernels.reference.swiglu`."""
    y = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if weights is None:
        weights = torch.ones(len(gate), device=gate.device)
    if y.numel():
        kernel = swiglu_kernel(width=gate.shape[1], limit=limit, source=type_name(gate), dtype=type_name(y))
        kernel(gate.contiguous(), up.contiguous(), weights.contiguous(), y)
    return y
