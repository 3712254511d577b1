"""One name for an operation on every device: its torch twin on a CPU, its TileLang kernel on a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def by_device(reference: Callable[P, R], module: str) -> Callable[P, R]:
    """`reference` for tensors on the CPU, the function of the same name in `kernels.<module>` for those on a GPU.

    The module is imported with the first tensor that needs it, since importing TileLang takes seconds.
    """

    @functools.cache
    def kernel() -> Callable[P, R]:
        found: Callable[P, R] = getattr(importlib.import_module(f"kernels.{module}"), reference.__name__)
        return found

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        return kernel()(*args, **kwargs) if _is_cuda(args[0]) else reference(*args, **kwargs)

    return operation


def _is_cuda(value: Any) -> bool:
    """Of a tensor, or of the first tensor in nested sequences."""
    while not isinstance(value, torch.Tensor):
        if not value:
            return False
        value = value[0]
    return value.is_cuda
