"""Every kernel compiles for the GPUs that we support, keeps its values in registers and fits their shared memory."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import kernels

_BODY = 'extern "C" __global__'
_USAGE = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)

ARCHITECTURES = ("sm_90a", "sm_121a")

# What one block of threads may have on GB10.
SHARED_BYTES = 101_376


class Lowered(NamedTuple):
    """CUDA C++ of a kernel: what it includes and calls, and the function itself."""

    arch: str
    head: str
    body: str
    entry: str
    shared_bytes: int


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of CUDA 13 or newer")
def test_kernels_compile(tmp_path: Path) -> None:
    """Every example of each kernel: the sizes of the real model, and small ones.

    Kernels that begin alike are compiled together, for reading headers takes longer than compiling most kernels; but
    examples of one kernel apart, for they have one name.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=_import_kernels) as pool:
        counts = pool.submit(_count_examples).result()
        assert len(counts) > 30
        examples = [(number, example) for number, count in enumerate(counts) for example in range(count)]
        cases = [(*example, arch) for example in examples for arch in ARCHITECTURES]
        together: dict[tuple[str, str, int], list[Lowered]] = defaultdict(list)
        for (_, example, arch), lowered in zip(cases, pool.map(_lower, *zip(*cases, strict=True)), strict=True):
            together[arch, lowered.head, example].append(lowered)
        files = [tmp_path / f"{number}.cu" for number in range(len(together))]
        problems = [problem for found in pool.map(_problems, together.values(), files) for problem in found]
    assert not problems, "\n".join(problems)


def _import_kernels() -> None:
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        importlib.import_module(module.name)


def _count_examples() -> list[int]:
    from kernels.tile import KERNELS

    return [len(kernel.examples) for kernel in KERNELS]


def _lower(number: int, example: int, arch: str) -> Lowered:
    from kernels.tile import KERNELS

    kernel = KERNELS[number]
    source, shared_bytes = kernel.lower(arch, **kernel.examples[example])
    begin = source.index(_BODY)
    return Lowered(arch, source[:begin], source[begin:], kernel.entry, shared_bytes)


def _problems(together: list[Lowered], source: Path) -> list[str]:
    """What is wrong with kernels of one head and one architecture."""
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    arch = together[0].arch
    source.write_text("\n".join([together[0].head, *(kernel.body for kernel in together)]), encoding="utf-8")
    includes = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)]
    flags = ["-cubin", f"-arch={arch}", "-std=c++17", "-O3", "-DENABLE_BF16", "-w", "--resource-usage"]
    command = ["nvcc", *flags, *includes, str(source), "-o", str(source.with_suffix(".cubin"))]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        names = ", ".join(kernel.entry for kernel in together)
        return [f"{arch}, one of {names}: does not compile\n{compiled.stderr[-2000:]}"]
    usage = dict(_USAGE.findall(compiled.stderr))
    return [problem for kernel in together if (problem := _excess(kernel, usage[kernel.entry]))]


def _excess(kernel: Lowered, usage: str) -> str | None:
    """What a kernel takes too much of, by what ptxas said of it."""
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", usage)))
    shared = kernel.shared_bytes + sum(map(int, re.findall(r"(\d+) bytes smem", usage)))
    if spilled or shared > SHARED_BYTES:
        return f"{kernel.entry}, {kernel.arch}: {spilled} bytes spilled, {shared} bytes of shared memory"
    return None
