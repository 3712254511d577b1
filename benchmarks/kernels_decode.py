"""Time, bytes and bandwidth of the decode kernels at the published sizes, beside the GPU's ceiling for reads.

    python -m benchmarks.kernels_decode

Every kernel is timed in a CUDA graph of several launches that go round several copies of its weights, so that the
cache holds none of them. The ceiling is a streaming sum of 4 GiB in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

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


def cases() -> list[tuple[str, int, Callable[[], Callable[[], None]]]]:
    """Name, bytes that must be read, and what makes a launch on weights of its own."""
    from kernels.decode.experts import experts_down, experts_up, routing_words
    from kernels.decode.linear import fused_linear, grouped_linear, quantised_linear

    d, width, q, stride = 4096, 2048, 1024, 4608
    f32 = {"dtype": torch.float32, "device": "cuda"}
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(1, d, **f32).bfloat16()
    codes, scales = fp8(1, d), torch.ones(1, d // 128, **f32)
    halves = torch.randn(1, d, dtype=torch.float16, device="cuda")

    def fused(n8: int, n16: int, k: int) -> Callable[[], Callable[[], None]]:
        kernel = fused_linear(n8=n8, n16=n16, k=k, s=1, rows_per_scale=128)

        def make() -> Callable[[], None]:
            w8, w16 = fp8(max(n8, 1), k), torch.randn(max(n16, 1), k, **bf16)
            scale, y = random_bytes(max(1, n8 // 128), k // 128, low=120, high=124), torch.empty(1, n8 + n16, **f32)
            own = (codes[:, :k].contiguous(), scales[:, : k // 128].contiguous(), x[:, :k].contiguous())
            return lambda: kernel(w8, scale, w16, *own, y)

        return make

    def wo_a() -> Callable[[], None]:
        kernel = grouped_linear(n=8192, groups=8, k=d, s=1, rows_per_scale=128)
        w, scale = fp8(8192, d), random_bytes(64, d // 128, low=120, high=124)
        o, y = torch.randn(1, 8 * d, **bf16), torch.empty(1, 8192, **bf16)
        return lambda: kernel(w, scale, o, y)

    def wo_b() -> Callable[[], None]:
        kernel = quantised_linear(n=d, k=8192, s=1, rows_per_scale=128)
        w, scale = fp8(d, 8192), random_bytes(32, 64, low=120, high=124)
        z, y = torch.randn(1, 8192, **bf16), torch.empty(1, d, **bf16)
        return lambda: kernel(w, scale, z, y)

    routing = torch.zeros(routing_words(6, 1), dtype=torch.int32, device="cuda")
    routing[0] = 6
    for begin in (1, 7, 13):  # experts, their places, their slots
        routing[begin : begin + 6] = torch.arange(6)
    routing[19:25] = torch.full((6,), 0.25).view(torch.int32)
    routing[25:31] = 1
    record = 3 * (width * d // 2 + width * d // 32)
    abort = torch.zeros(1, dtype=torch.int32, device="cuda")
    waited = torch.zeros(1, dtype=torch.uint32, device="cuda")
    shared, hidden = torch.empty(1, d, **bf16), torch.randn(6, 1, width, **bf16)

    def up() -> Callable[[], None]:
        kernel = experts_up(d=d, width=width, stride=stride, topk=6, limit=10.0, s=1, rows_per_scale=128)
        pool, w2, scale = (
            random_bytes(6, record, low=100, high=130),
            fp8(d, width),
            random_bytes(32, 16, low=120, high=124),
        )
        y, row = torch.randn(1, stride, **f32), torch.arange(256, dtype=torch.int32, device="cuda")
        own = (y, w2, scale, halves, scales, pool, routing, row, abort, waited, shared, torch.empty_like(hidden))
        return lambda: kernel(*own)

    def down() -> Callable[[], None]:
        kernel = experts_down(d=d, width=width, topk=6, s=1)
        pool, out = random_bytes(6, record, low=100, high=130), torch.empty(6, 1, d, **bf16)
        return lambda: kernel(hidden, pool, routing, out)

    return [
        ("inputs, ratio 0: wq_a, wkv", 1536 * d, fused(1536, 0, d)),
        ("inputs, ratio 4: and compressors, weights_proj", 1536 * d + 2 * 2624 * d, fused(1536, 2624, d)),
        ("wq_b", 32768 * q, fused(32768, 0, q)),
        ("wo_a", 8192 * d, wo_a),
        ("wo_b", d * 8192, wo_b),
        ("gates, shared w1, w3", 2 * width * d + 2 * 512 * d, fused(2 * width, 512, d)),
        ("experts w1, w3 of 6, shared w2", 6 * 2 * (width * d // 2 + width * d // 32) + width * d, up),
        ("experts w2 of 6", 6 * (width * d // 2 + width * d // 32), down),
        ("head", 2 * 129280 * d, fused(0, 129280, d)),
    ]


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
