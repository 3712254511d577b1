"""A rehearsal notes what would be compiled and leaves nothing behind; what it noted is compiled side by side."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tilelang
import torch
from helpers.toy_kernels import target, toy_kernels
from tilelang import tvm

from kernels.norm import head_norm_kernel, rms_norm_kernel
from kernels.rehearsal import compile_all, rehearsal
from kernels.tile import Program, TileKernel

WAIT_S = 30.0


class Compiler:
    """Notes what it compiles, and stumbles over `bad`."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, int]] = []
        self.bad: int | None = None

    def __call__(self, name: str, n: int) -> None:
        if n == self.bad:
            raise RuntimeError("nvcc says no")
        self.compiled.append((name, n))


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> list[TileKernel]:
    return toy_kernels(monkeypatch, compiler, "first", "second")


@pytest.fixture
def empty_is_nan() -> Iterator[None]:
    """Memory that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def programs_of(kernel: TileKernel, *sizes: int) -> list[Program]:
    return [Program(kernel, (("n", n),)) for n in sizes]


def test_every_program_is_noted_once_and_none_is_compiled_or_launched(
    compiler: Compiler, toys: list[TileKernel]
) -> None:
    x = torch.ones(3)
    with rehearsal() as programs:
        for kernel, n in ((toys[0], 1), (toys[1], 1), (toys[0], 1), (toys[0], 2)):
            kernel(n=n)(x)
    assert list(programs) == [*programs_of(toys[0], 1), *programs_of(toys[1], 1), *programs_of(toys[0], 2)]
    assert compiler.compiled == []
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.usefixtures("empty_is_nan")
def test_what_a_kernel_would_have_written_is_zeros(dtype: torch.dtype) -> None:
    with rehearsal(), torch.inference_mode():
        x = torch.empty(2, 3, dtype=dtype)
        assert not x.float().any()
        assert not torch.empty_like(x).float().any()
        assert torch.ones(2).all()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.usefixtures("empty_is_nan")
def test_nothing_stays_behind(compiler: Compiler, toys: list[TileKernel], error: type[BaseException] | None) -> None:
    try:
        with rehearsal() as programs:
            toys[0](n=5)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    x = torch.empty(2)
    assert x.isnan().all()
    toys[0](n=5)(x)
    assert x.tolist() == [5, 5]
    assert compiler.compiled == [("first", 5)]
    assert len(programs) == 1


def test_other_threads_go_on_as_ever(compiler: Compiler, toys: list[TileKernel]) -> None:
    with rehearsal() as programs, ThreadPoolExecutor(1) as pool:
        pool.submit(toys[0], n=1).result()
    assert compiler.compiled == [("first", 1)]
    assert not programs


def test_all_are_compiled_once_with_progress(compiler: Compiler, toys: list[TileKernel]) -> None:
    seen: list[tuple[int, int]] = []
    programs = [*programs_of(toys[0], 1, 2), *programs_of(toys[1], 1)]
    with target():
        compile_all(programs, 2, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert sorted(compiler.compiled) == [("first", 1), ("first", 2), ("second", 1)]
    for program in programs:
        program.compile()
    assert len(compiler.compiled) == 3


def test_as_many_are_compiled_side_by_side_as_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """None goes on before all three have begun."""
    together = threading.Barrier(3, timeout=WAIT_S)
    (toy,) = toy_kernels(monkeypatch, lambda name, n: together.wait() and None, "toy")
    with target():
        compile_all(programs_of(toy, 1, 2, 3), 3, lambda done, total: None)
    assert not together.broken


def test_an_error_names_the_program_and_ends_the_rest(compiler: Compiler, toys: list[TileKernel]) -> None:
    compiler.bad = 2
    with target(), pytest.raises(RuntimeError, match="nvcc says no") as caught:
        compile_all(programs_of(toys[0], *range(1000)), 1, lambda done, total: None)
    assert caught.value.__notes__ == ["while compiling first(n=2)"]
    assert len(compiler.compiled) < 999


def test_every_thread_compiles_for_the_gpu_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    (toy,) = toy_kernels(monkeypatch, lambda name, n: seen.add(str(tvm.target.Target.current())), "toy")
    with target() as own:
        compile_all(programs_of(toy, 1, 2, 3), 2, lambda done, total: None)
    assert seen == {str(own)}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of CUDA 13 or newer")
def test_threads_compile_real_kernels() -> None:
    """Without TileLang's files, so that compilers run; afterwards each kernel has what launches."""
    sizes = (("d", 64), ("dtype", "bfloat16"), ("eps", 1e-6))
    programs = [Program(rms_norm_kernel, sizes), Program(head_norm_kernel, sizes)]
    tilelang.disable_cache()
    try:
        with target():
            compile_all(programs, 2, lambda done, total: None)
    finally:
        tilelang.enable_cache()
    for kernel, name in ((rms_norm_kernel, "rms_norm"), (head_norm_kernel, "head_norm")):
        assert f"{name}_kernel" in kernel(**dict(sizes)).get_kernel_source()
        kernel._compiled.cache_clear()
