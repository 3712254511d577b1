"""Time, bytes and bandwidth of the decode kernels at the published sizes, beside the GPU's ceiling for reads.

    python -m benchmarks.kernels_decode

Every kernel is timed in a CUDA graph of several launches that go round several copies of its weights, so that the
cache holds none of them. The ceiling is a streaming sum of 4 GiB in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.report import save

COPIES_BYTES = 512 << 20


class Row(NamedTuple):
    name: str
    us: float
    mb: float
    tb_s: float
    ratio: float


def median_us(launches: list[Callable[[], None]], repeats: int = 30) -> float:
    """Of one launch: a graph of all of them, replayed."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def ceiling() -> float:
    """Bytes a second of reads: the best of several reductions over 4 GiB."""
    x = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    best = 0.0
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        x.sum()
        end.record()
        end.synchronize()
        best = max(best, x.nbytes / begin.elapsed_time(end) * 1e3)
    return best


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def fp8(n: int, k: int) -> torch.Tensor:
    """Finite e4m3 codes."""
    return random_bytes(n, k) & 0xF7


Make = Callable[[], Callable[[], None]]
Case = tuple[str, int, Make]
"""Name, bytes that must be read, and what makes a launch on weights of its own."""

D, WIDTH, Q, TOPK = 4096, 2048, 1024, 6
F32: dict[str, Any] = {"dtype": torch.float32, "device": "cuda"}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def cases() -> list[Case]:
    return [*linear_cases(), *expert_cases()]


def linear_cases() -> list[Case]:
    from kernels.decode.linear import fused_linear, grouped_linear, quantised_linear

    x = torch.randn(1, D, **F32).bfloat16()
    codes, scales = fp8(1, D), torch.ones(1, D // 128, **F32)

    def fused(n8: int, n16: int, k: int) -> Make:
        kernel = fused_linear(n8=n8, n16=n16, k=k, s=1, rows_per_scale=128)

        def make() -> Callable[[], None]:
            w8, w16 = fp8(max(n8, 1), k), torch.randn(max(n16, 1), k, **BF16)
            scale, y = random_bytes(max(1, n8 // 128), k // 128, low=120, high=124), torch.empty(1, n8 + n16, **F32)
            own = (codes[:, :k].contiguous(), scales[:, : k // 128].contiguous(), x[:, :k].contiguous())
            return lambda: kernel(w8, scale, w16, *own, y)

        return make

    def wo_a() -> Callable[[], None]:
        kernel = grouped_linear(n=8192, groups=8, k=D, s=1, rows_per_scale=128)
        w, scale = fp8(8192, D), random_bytes(64, D // 128, low=120, high=124)
        o, y = torch.randn(1, 8 * D, **BF16), torch.empty(1, 8192, **BF16)
        return lambda: kernel(w, scale, o, y)

    def wo_b() -> Callable[[], None]:
        kernel = quantised_linear(n=D, k=8192, s=1, rows_per_scale=128)
        w, scale = fp8(D, 8192), random_bytes(32, 64, low=120, high=124)
        z, y = torch.randn(1, 8192, **BF16), torch.empty(1, D, **BF16)
        return lambda: kernel(w, scale, z, y)

    return [
        ("inputs, ratio 0: wq_a, wkv", 1536 * D, fused(1536, 0, D)),
        ("inputs, ratio 4: and compressors, weights_proj", 1536 * D + 2 * 2624 * D, fused(1536, 2624, D)),
        ("wq_b", 32768 * Q, fused(32768, 0, Q)),
        ("wo_a", 8192 * D, wo_a),
        ("wo_b", D * 8192, wo_b),
        ("gates, shared w1, w3", 2 * WIDTH * D + 2 * 512 * D, fused(2 * WIDTH, 512, D)),
        ("head", 2 * 129280 * D, fused(0, 129280, D)),
    ]


def expert_cases() -> list[Case]:
    from kernels.decode.experts import experts_down, experts_up

    stride = 2 * WIDTH + 512  # the shared expert's products and those of two gates
    matrix = WIDTH * D // 2 + WIDTH * D // 32
    halves, scales = torch.randn(1, D, dtype=torch.float16, device="cuda"), torch.ones(1, D // 128, **F32)
    routing, row = resident_routing(), torch.arange(256, dtype=torch.int32, device="cuda")
    abort = torch.zeros(1, dtype=torch.int32, device="cuda")
    waited = torch.zeros(1, dtype=torch.uint32, device="cuda")
    shared, hidden = torch.empty(1, D, **BF16), torch.randn(TOPK, 1, WIDTH, **BF16)

    def up() -> Callable[[], None]:
        kernel = experts_up(d=D, width=WIDTH, stride=stride, topk=TOPK, limit=10.0, s=1, rows_per_scale=128)
        pool, w2 = random_bytes(TOPK, 3 * matrix, low=100, high=130), fp8(D, WIDTH)
        scale, y = random_bytes(32, 16, low=120, high=124), torch.randn(1, stride, **F32)
        own = (y, w2, scale, halves, scales, pool, routing, row, abort, waited, shared, torch.empty_like(hidden))
        return lambda: kernel(*own)

    def down() -> Callable[[], None]:
        kernel = experts_down(d=D, width=WIDTH, topk=TOPK, s=1)
        pool, out = random_bytes(TOPK, 3 * matrix, low=100, high=130), torch.empty(TOPK, 1, D, **BF16)
        return lambda: kernel(hidden, pool, routing, out)

    return [
        ("experts w1, w3 of 6, shared w2", TOPK * 2 * matrix + WIDTH * D, up),
        ("experts w2 of 6", TOPK * matrix, down),
    ]


def resident_routing() -> torch.Tensor:
    """What the router leaves of one token whose experts are all there; see `Routing` in experts.cuh."""
    from kernels.decode.experts import routing_words

    routing = torch.zeros(routing_words(TOPK, 1), dtype=torch.int32, device="cuda")
    experts, places, slots = (torch.arange(TOPK) for _ in range(3))
    weights, is_used = torch.full((TOPK,), 0.25).view(torch.int32), torch.ones(TOPK, dtype=torch.int32)
    routing.copy_(torch.cat((torch.tensor([TOPK]), experts, places, slots, weights, is_used)))
    return routing


def main() -> None:
    best = ceiling()
    print(f"ceiling: {best / 1e12:.2f} TB/s of reads")
    rows = []
    for name, nbytes, make in cases():
        launches = [make() for _ in range(max(2, min(16, COPIES_BYTES // nbytes + 1)))]
        us = median_us(launches)
        rows.append(Row(name, us, nbytes / 1e6, nbytes / us / 1e6, nbytes / us * 1e6 / best))
        print(
            f"{name:50s} {us:8.1f} us {nbytes / 1e6:8.1f} MB {rows[-1].tb_s:6.2f} TB/s {rows[-1].ratio:6.1%}",
            flush=True,
        )
        del launches
    save("kernels_decode", {"ceiling_tb_s": best / 1e12, "kernels": [row._asdict() for row in rows]})


if __name__ == "__main__":
    main()
