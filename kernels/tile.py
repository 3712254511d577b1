"""Builds TileLang kernels: once per shape for the GPU at hand or, where there is none, as source for any architecture.

A kernel is a function of static sizes that returns a TileLang program, decorated with `tile_kernel`. Calling it with
sizes gives what launches on torch tensors, outputs included, on the current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import tilelang
import tilelang.cuda.language as cuda
import torch
import tvm

# Warp specialisation and TMA (see `copy`) are Hopper's; GB10 (sm_121) has neither in a usable form, and one form serves
# both.
_PASS_CONFIGS = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}

KERNELS: list[TileKernel] = []
"""Every kernel of the modules imported so far, for tests and for compiling ahead of use."""


NOTED: ContextVar[dict[Program, None] | None] = ContextVar("NOTED", default=None)
"""Where this thread's kernels are noted, in order, instead of compiled and launched; see `kernels.rehearsal`."""


class Program(NamedTuple):
    """A kernel and sizes, which can be compiled."""

    kernel: TileKernel
    sizes: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.kernel.name}({', '.join(f'{name}={value!r}' for name, value in self.sizes)})"

    def compile(self) -> None:
        """For this thread's GPU, unless the kernel has it already."""
        self.kernel(**dict(self.sizes))


class Lowered(NamedTuple):
    """CUDA C++, and the bytes of dynamic shared memory that a launch asks for."""

    source: str
    shared_bytes: int


class TileKernel:
    """A family of programs, each named `entry` on the GPU. `examples` are sizes that tests compile for every
    architecture we support."""

    def __init__(self, build: Callable[..., Any], examples: tuple[Mapping[str, Any], ...]) -> None:
        self.name = build.__name__
        self.module = build.__module__
        self.entry = f"{self.name.removesuffix('_kernel')}_kernel"
        self.examples = examples
        self._build = build
        self._compiled = functools.cache(self._compile)
        KERNELS.append(self)

    def __call__(self, **sizes: Any) -> Callable[..., None]:
        """The compiled program of these sizes; compiled at the first call, kept for the life of the process."""
        if (noted := NOTED.get()) is not None:
            noted[Program(self, tuple(sizes.items()))] = None
            return _launch_nothing
        return self._compiled(**sizes)

    def lower(self, arch: str, **sizes: Any) -> Lowered:
        """The program for an architecture such as "sm_121a"; needs no GPU."""
        target = tvm.target.Target({"kind": "cuda", "arch": arch})
        with target, tvm.transform.PassContext(config=_PASS_CONFIGS):
            lowered = tilelang.lower(self._build(**sizes), target=target)
        (function,) = lowered.device_mod.functions.values()
        return Lowered(str(lowered.kernel_source), int(function.attrs.get("dyn_shared_memory_buf", 0)))

    def source(self, arch: str, **sizes: Any) -> str:
        """CUDA C++ of `lower`."""
        return self.lower(arch, **sizes).source

    def _compile(self, **sizes: Any) -> Callable[..., None]:
        compiled = tilelang.compile(self._build(**sizes), pass_configs=_PASS_CONFIGS)
        executable = compiled.adapter.get_exportable_executable()
        if isinstance(executable, tvm.runtime.Executable):
            executable.jit()  # links the host's part, for which the first launch would wait
        launch: Callable[..., None] = compiled
        return launch


def _launch_nothing(*tensors: object) -> None:
    """What a rehearsal has in place of a compiled program."""


def tile_kernel(*examples: Mapping[str, Any]) -> Callable[[Callable[..., Any]], TileKernel]:
    """Decorates a function of keyword sizes that returns a TileLang program."""

    def decorate(build: Callable[..., Any]) -> TileKernel:
        return TileKernel(build, examples)

    return decorate


def copy(source: Any, target: Any) -> Any:
    """`T.copy` inside a program, by threads rather than by TMA."""
    return cuda.copy(source, target, disable_tma=True)


def type_name(x: torch.Tensor) -> str:
    """The element type of a tensor, as TileLang calls it."""
    return str(x.dtype).removeprefix("torch.")
