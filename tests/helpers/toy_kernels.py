"""Kernels that no compiler has to see: compiling one calls a function of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tilelang import tvm

from kernels import tile

Compile = Callable[[str, int], None]
"""Called with a kernel's name and its size n; may raise."""


def toy_kernels(patch: pytest.MonkeyPatch, compile_one: Compile, *names: str) -> list[tile.TileKernel]:
    """A kernel for each name, of one size `n`; a compiled one puts n into the tensor that it is launched on."""

    def compiled(kernel: tile.TileKernel, **sizes: Any) -> Callable[..., None]:
        compile_one(kernel.name, sizes["n"])
        return lambda tensor: tensor.fill_(sizes["n"])

    patch.setattr(tile, "KERNELS", [])
    patch.setattr(tile.TileKernel, "_compile", compiled)
    return [tile.TileKernel(_named(name), ({"n": 1},)) for name in names]


def target() -> tvm.target.Target:
    """What is compiled for inside of `with target()`, for machines without a GPU."""
    return tvm.target.Target({"kind": "cuda", "arch": "sm_121a"})


def _named(name: str) -> Callable[..., Any]:
    def build(n: int) -> Any:
        raise AssertionError("nobody builds it")

    build.__name__ = name
    return build
