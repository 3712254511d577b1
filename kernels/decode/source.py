"""The device code of the decode kernels. Work of single lanes and warps, such as fragments of mma.sync and waits for
another process, is written in CUDA C++; TileLang gives it shapes, grid, arguments and the launch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import tilelang.cuda.language as cuda
import tilelang.language as T

_FILES = (
    *("chain", "system", "warp", "block", "linear", "streams", "attention", "indexer"),
    *("hints", "experts", "sampling"),
)
"""In the order in which they need each other."""


@functools.cache
def source() -> str:
    """CUDA C++ that every decode kernel begins with."""
    here = Path(__file__).parent
    files = [here.parent / "selection.cuh", *(here / f"{name}.cuh" for name in _FILES)]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def call(function: str, sizes: tuple[object, ...], *arguments: Any) -> Any:
    """Call a template of namespace icebox; a buffer is passed as the address of its first element.

    The wait behind it is for blocks that left early; it also has the kernel launched while the one before runs, see
    chain.cuh.
    """
    name = f"icebox::{function}<{', '.join(str(int(size) if isinstance(size, bool) else size) for size in sizes)}>"
    T.evaluate(T.call_extern("handle", name, *(_address(a) for a in arguments)))
    return cuda.pdl_sync()


def _address(argument: Any) -> Any:
    shape = getattr(argument, "shape", None)
    return argument if shape is None else T.address_of(argument[tuple(0 for _ in shape)])
