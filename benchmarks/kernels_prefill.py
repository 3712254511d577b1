"""The matrix kernels of prefill on this machine's GPU, at the sizes of DeepSeek-V4-Flash.

    python -m benchmarks.kernels_prefill [--tokens 2048]

Times are medians, between events on the GPU, with inputs that were not touched for longer than its caches hold. The
first row is the ceiling: a large product by PyTorch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch

import kernels
from benchmarks import report

HIDDEN, WIDTH, EXPERTS, TOPK = 4096, 2048, 256, 6
HEADS, HEAD_DIM, WINDOW, INDEX_TOPK = 64, 512, 128, 512
INDEX_HEADS, INDEX_DIM = 64, 128
LINEARS = {"wq_a and wkv": (1536, 4096), "wq_b": (32768, 1024), "wo_b": (4096, 8192), "shared w1": (2048, 4096)}
CUDA = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a chunk of prefill")
    parser.add_argument("--entries", type=int, default=16384, help="compressed entries that the indexer scores")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    m = arguments.tokens
    figures = {"gpu": torch.cuda.get_device_name(), "tokens": m, "entries": arguments.entries}
    kinds = {**_ceiling(), **_linears(m), **_experts(m), **_attention(m), **_indexer(m, arguments.entries)}
    report.save("kernels_prefill", {**figures, "kernels": kinds})
    rows = {
        name: f"{f['ms']:8.3f} ms {f['tflops']:7.1f} TFLOP/s {f['gb_per_s']:7.0f} GB/s" for name, f in kinds.items()
    }
    report.show(f"{figures['gpu']}, {m} tokens", rows)


def _ceiling(n: int = 8192) -> dict[str, dict[str, float]]:
    a, b = _values(n, n), _values(n, n)
    return {f"torch, {n} cubed": _figures(lambda: a @ b, 2 * n**3, 6 * n**2)}


def _linears(m: int) -> dict[str, dict[str, float]]:
    figures = {}
    for name, (n, k) in LINEARS.items():
        codes = torch.randn(n, k, device=CUDA).type(torch.float8_e4m3fn)
        scale = torch.full((n // 128, k // 128), 120, dtype=torch.uint8, device=CUDA).view(torch.float8_e8m0fnu)
        weight, x = kernels.prepare_fp8((codes, scale)), _values(m, k)
        run = partial(kernels.fp8_linear, x, weight, torch.bfloat16)
        figures[f"fp8_linear {name}"] = _figures(run, 2 * m * n * k, n * k + 2 * m * (n + k))
    n = 2 * 1024 + 2 * 256 + INDEX_HEADS
    weight, x = _values(n, HIDDEN), _values(m, HIDDEN)
    run = partial(kernels.float_linear, x, weight)
    figures["float_linear compressors"] = _figures(run, 2 * m * n * HIDDEN, 2 * n * HIDDEN + 2 * m * HIDDEN + 4 * m * n)
    return figures


def _experts(m: int) -> dict[str, dict[str, float]]:
    """One wave of all experts, every one with its share of tokens."""
    record_bytes = 3 * WIDTH * HIDDEN * 17 // 32
    pool = torch.randint(112, 120, (EXPERTS, record_bytes), dtype=torch.uint8, device=CUDA)
    ids = torch.rand(m, EXPERTS, device=CUDA).topk(TOPK).indices.flatten()
    order = ids.argsort(stable=True)
    ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0).tolist()
    spans = zip([0, *ends], ends, strict=False)
    experts = [kernels.ExpertRows(record, *span) for record, span in zip(pool, spans, strict=True) if span[1] > span[0]]
    x, tokens = _values(m, HIDDEN), (order // TOPK).int()
    routing, out = torch.rand(m * TOPK, device=CUDA), _values(m * TOPK, HIDDEN)
    places, shared = torch.argsort(order).int().view(m, TOPK).sort(1).values, _values(m, HIDDEN)
    mlp = _figures(
        lambda: kernels.expert_mlp(x, tokens, routing, experts, WIDTH, 10.0, out),
        6 * m * TOPK * WIDTH * HIDDEN,
        len(experts) * record_bytes,
    )
    total = _figures(lambda: kernels.expert_sum(out, places, shared), m * TOPK * HIDDEN, 2 * m * (TOPK + 2) * HIDDEN)
    return {"expert_mlp": mlp, "expert_sum": total}


def _attention(m: int) -> dict[str, dict[str, float]]:
    j = WINDOW + INDEX_TOPK
    q, kv, sink = _values(m, HEADS, HEAD_DIM), _values(m + 4096, HEAD_DIM), torch.zeros(HEADS, device=CUDA)
    lists = torch.rand(m, m + 4096, device=CUDA).topk(j).indices.int()
    run = partial(kernels.sparse_attention, q, kv, sink, lists, HEAD_DIM**-0.5)
    return {"sparse_attention": _figures(run, 4 * m * HEADS * j * HEAD_DIM, 2 * m * j * HEAD_DIM)}


def _indexer(m: int, entries: int) -> dict[str, dict[str, float]]:
    q, k, weights = _values(m, INDEX_HEADS, INDEX_DIM), _values(entries, INDEX_DIM), _values(m, INDEX_HEADS)
    scores, visible = kernels.index_scores(q, k, weights), torch.ones(m, entries, dtype=torch.bool, device=CUDA)
    return {
        "index_scores": _figures(
            lambda: kernels.index_scores(q, k, weights), 2 * m * entries * INDEX_HEADS * INDEX_DIM, 4 * m * entries
        ),
        "index_topk": _figures(lambda: kernels.index_topk(scores, visible, INDEX_TOPK), 0, 6 * m * entries),
    }


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


def _figures(run: Callable[[], object], flops: int, nbytes: int, rounds: int = 20) -> dict[str, float]:
    """Median time of `run`, with what that makes of its operations and of the bytes that it must move at least."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)
    times = []
    for _ in range(rounds + 2):  # the first compile and warm up
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    ms = statistics.median(times[2:])
    return {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 2), "gb_per_s": round(nbytes / ms / 1e6, 1)}


if __name__ == "__main__":
    main()
