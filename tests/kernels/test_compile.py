"""Every kernel compiles for the GPUs that we support, keeps its values in registers and fits their shared memory."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import kernels

ARCHITECTURES = ("sm_90a", "sm_121a")

# What one block of threads may have on GB10.
SHARED_BYTES = 101_376


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of CUDA 13 or newer")
def test_kernels_compile(tmp_path: Path) -> None:
    """Of each kernel the first example: the sizes of the real model."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=_import_kernels) as pool:
        names = pool.submit(_names).result()
        assert len(names) > 20
        cases = [(name, arch, tmp_path) for name in names for arch in ARCHITECTURES]
        problems = [problem for problem in pool.map(_problem, *zip(*cases, strict=True)) if problem]
    assert not problems, "\n".join(problems)


def _import_kernels() -> None:
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        importlib.import_module(module.name)


def _names() -> list[str]:
    from kernels.tile import KERNELS

    return [f"{kernel.module}.{kernel.name}" for kernel in KERNELS]


def _problem(name: str, arch: str, folder: Path) -> str | None:
    """What is wrong with a kernel, or None. Runs in a process of its own."""
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    from kernels.tile import KERNELS

    kernel = next(kernel for kernel in KERNELS if f"{kernel.module}.{kernel.name}" == name)
    lowered = kernel.lower(arch, **kernel.examples[0])
    source = folder / f"{name}.{arch}.cu"
    source.write_text(lowered.source, encoding="utf-8")
    includes = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)]
    flags = ["-cubin", f"-arch={arch}", "-std=c++17", "-O3", "-DENABLE_BF16", "-w", "--resource-usage"]
    command = ["nvcc", *flags, *includes, str(source), "-o", str(source.with_suffix(".cubin"))]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        return f"{name}, {arch}: does not compile\n{compiled.stderr[-2000:]}"
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", compiled.stderr)))
    shared = lowered.shared_bytes + sum(map(int, re.findall(r"(\d+) bytes smem", compiled.stderr)))
    if spilled or shared > SHARED_BYTES:
        return f"{name}, {arch}: {spilled} bytes spilled, {shared} bytes of shared memory"
    return None
