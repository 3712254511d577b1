"""A kernel with a fault that compute-sanitizer must find: `python -m benchmarks.sanitizer_faults TOOL`."""

from __future__ import annotations

import sys
from typing import Any

import tilelang.language as T
import torch

from kernels.tile import tile_kernel

_THREADS = 64
_SOURCE = """
// One element behind the end.
__device__ void memcheck(float* x, int n) { x[threadIdx.x + 1] = float(n); }

// What another warp writes, without waiting for it.
__device__ void racecheck(float* x, int n) {
  __shared__ float values[64];
  values[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = values[n - 1 - threadIdx.x];
}
"""


@tile_kernel({"fault": "memcheck"}, {"fault": "racecheck"})
def planted_kernel(fault: str) -> Any:
    @T.prim_func
    def planted(x: T.Tensor((_THREADS,), "float32")) -> None:
        with T.Kernel(1, threads=_THREADS, prelude=_SOURCE):
            T.call_extern("handle", fault, T.address_of(x[0]), _THREADS)

    return planted


def main() -> None:
    planted_kernel(fault=sys.argv[1])(torch.zeros(_THREADS, device="cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
