"""Sizes that a step's kernels would compute wrongly are not built."""

from __future__ import annotations

import pytest

from kernels.decode.linear import fused_linear
from kernels.decode.streams import head_read, sublayer_read
from kernels.tile import TileKernel

READ = {"s": 1, "eps": 1e-6, "hc_eps": 1e-6}


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (fused_linear, {"n8": 0, "n16": 1000, "k": 128, "s": 1, "rows_per_scale": 128}),
        (fused_linear, {"n8": 8, "n16": 8, "k": 128, "s": 1, "rows_per_scale": 128}),
        (sublayer_read, {"d": 384, "iterations": 20, **READ}),
        (head_read, {"d": 640, **READ}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kernel: TileKernel, sizes: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="are not"):
        kernel.source("sm_90a", **sizes)
