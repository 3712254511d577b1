"""Hyper-connections: the projection that sets the mixing, Sinkhorn's iterations, and the mixing itself."""

from typing import Any

import tilelang.language as T
import torch

from kernels.tile import tile_kernel, type_name

_THREADS = 128
_WARP = 32
_TOKENS = 4  # whose sums a block of threads keeps in registers while it reads the projection once
_VECTOR = 4


@tile_kernel(
    {"width": 16384, "k": 24, "dtype": "bfloat16", "eps": 1e-6},
    {"width": 16384, "k": 4, "dtype": "bfloat16", "eps": 1e-6},
    {"width": 512, "k": 24, "dtype": "float32", "eps": 1e-6},
)
def hc_mixes_kernel(width: int, k: int, dtype: str, eps: float) -> Any:
    """Plain float32 products: tensor cores would round the projection. The sum after the last output is of squares."""
    m, warps = T.dynamic("m"), _THREADS // _WARP
    assert width % (_THREADS * _VECTOR) == 0, "a token's streams are a multiple of 512 values"
    assert _TOKENS * k <= _THREADS, "in the end a thread has one output"

    @T.prim_func
    def hc_mixes(
        h: T.Tensor((m, width), dtype), fn: T.Tensor((k, width), "float32"), mixes: T.Tensor((m, k), "float32")
    ) -> None:
        with T.Kernel(T.ceildiv(m, _TOKENS), threads=_THREADS) as part:
            values = T.alloc_local((_TOKENS, _VECTOR), "float32")
            weights = T.alloc_local((_VECTOR,), "float32")
            sums = T.alloc_local((_TOKENS, k + 1), "float32")
            of_warps = T.alloc_shared((warps, _TOKENS, k + 1), "float32")
            total = T.alloc_local((2,), "float32")
            thread = T.get_thread_binding()
            for t in T.unroll(_TOKENS):
                for j in T.unroll(k + 1):
                    sums[t, j] = 0
            for step in T.serial(width // (_THREADS * _VECTOR)):
                column = (step * _THREADS + thread) * _VECTOR
                for t in T.unroll(_TOKENS):
                    for v in T.vectorized(_VECTOR):
                        values[t, v] = T.cast(h[T.min(part * _TOKENS + t, m - 1), column + v], "float32")
                    for v in T.unroll(_VECTOR):
                        sums[t, k] += values[t, v] * values[t, v]
                for j in T.unroll(k):
                    for v in T.vectorized(_VECTOR):
                        weights[v] = fn[j, column + v]
                    for t in T.unroll(_TOKENS):
                        for v in T.unroll(_VECTOR):
                            sums[t, j] += values[t, v] * weights[v]
            for t in T.unroll(_TOKENS):
                for j in T.unroll(k + 1):
                    sums[t, j] = T.warp_reduce_sum(sums[t, j])
                    if thread % _WARP == 0:
                        of_warps[thread // _WARP, t, j] = sums[t, j]
            T.sync_threads()
            if thread < _TOKENS * k:
                t, j = thread // k, thread % k
                total[0] = 0
                total[1] = 0
                for w in T.unroll(warps):
                    total[0] += of_warps[w, t, j]
                    total[1] += of_warps[w, t, k]
                if part * _TOKENS + t < m:
                    mixes[part * _TOKENS + t, j] = total[0] * T.rsqrt(total[1] / width + T.float32(eps))

    return hc_mixes


@tile_kernel({"n": 4, "iterations": 20, "eps": 1e-6})
def hc_split_sinkhorn_kernel(n: int, iterations: int, eps: float) -> Any:
    m, width = T.dynamic("m"), (2 + n) * n

    def sigmoid(x: Any) -> Any:
        return T.float32(1.0) / (T.float32(1.0) + T.exp(-x))

    @T.prim_func
    def hc_split_sinkhorn(
        mixes: T.Tensor((m, width), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((width,), "float32"),
        pre: T.Tensor((m, n), "float32"),
        post: T.Tensor((m, n), "float32"),
        comb: T.Tensor((m, n, n), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(m, _WARP), threads=_WARP) as part:
            c = T.alloc_local((n, n), "float32")
            value = T.alloc_local((1,), "float32")
            token = part * _WARP + T.get_thread_binding()
            if token < m:
                for j in T.unroll(n):
                    pre[token, j] = sigmoid(mixes[token, j] * scale[0] + base[j]) + T.float32(eps)
                    post[token, j] = T.float32(2.0) * sigmoid(mixes[token, n + j] * scale[1] + base[n + j])
                for j in T.unroll(n):
                    for k in T.unroll(n):
                        c[j, k] = mixes[token, 2 * n + n * j + k] * scale[2] + base[2 * n + n * j + k]
                    value[0] = -T.infinity("float32")
                    for k in T.unroll(n):
                        value[0] = T.max(value[0], c[j, k])
                    for k in T.unroll(n):
                        c[j, k] = T.exp(c[j, k] - value[0])
                    value[0] = 0
                    for k in T.unroll(n):
                        value[0] += c[j, k]
                    for k in T.unroll(n):
                        c[j, k] = c[j, k] / value[0] + T.float32(eps)
                for iteration in T.serial(iterations):
                    if iteration > 0:
                        for j in T.unroll(n):
                            value[0] = 0
                            for k in T.unroll(n):
                                value[0] += c[j, k]
                            for k in T.unroll(n):
                                c[j, k] = c[j, k] / (value[0] + T.float32(eps))
                    for k in T.unroll(n):
                        value[0] = 0
                        for j in T.unroll(n):
                            value[0] += c[j, k]
                        for j in T.unroll(n):
                            c[j, k] = c[j, k] / (value[0] + T.float32(eps))
                for j in T.unroll(n):
                    for k in T.unroll(n):
                        comb[token, j, k] = c[j, k]

    return hc_split_sinkhorn


@tile_kernel({"n": 4, "d": 4096, "dtype": "bfloat16"}, {"n": 4, "d": 128, "dtype": "float32"})
def hc_pre_kernel(n: int, d: int, dtype: str) -> Any:
    m = T.dynamic("m")

    @T.prim_func
    def hc_pre(h: T.Tensor((m, n, d), dtype), pre: T.Tensor((m, n), "float32"), x: T.Tensor((m, d), dtype)) -> None:
        with T.Kernel(m, threads=_THREADS) as token:
            total = T.alloc_fragment((d,), "float32")
            T.clear(total)
            for j in T.serial(n):
                for i in T.Parallel(d):
                    total[i] += pre[token, j] * T.cast(h[token, j, i], "float32")
            for i in T.Parallel(d):
                x[token, i] = T.cast(total[i], dtype)

    return hc_pre


@tile_kernel({"n": 4, "d": 4096, "dtype": "bfloat16"}, {"n": 4, "d": 128, "dtype": "float32"})
def hc_post_kernel(n: int, d: int, dtype: str) -> Any:
    m = T.dynamic("m")

    @T.prim_func
    def hc_post(
        x: T.Tensor((m, d), dtype),
        h: T.Tensor((m, n, d), dtype),
        post: T.Tensor((m, n), "float32"),
        comb: T.Tensor((m, n, n), "float32"),
        y: T.Tensor((m, n, d), dtype),
    ) -> None:
        with T.Kernel(m, n, threads=_THREADS) as (token, k):
            total = T.alloc_fragment((d,), "float32")
            for i in T.Parallel(d):
                total[i] = post[token, k] * T.cast(x[token, i], "float32")
            for j in T.serial(n):
                for i in T.Parallel(d):
                    total[i] += comb[token, j, k] * T.cast(h[token, j, i], "float32")
            for i in T.Parallel(d):
                y[token, k, i] = T.cast(total[i], dtype)

    return hc_post


def hc_mixes(h: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.hc_mixes`."""
    mixes = torch.empty(len(h), len(fn), device=h.device)
    if len(h):
        rows = h.flatten(1).contiguous()
        hc_mixes_kernel(width=rows.shape[1], k=len(fn), dtype=type_name(h), eps=eps)(rows, fn, mixes)
    return mixes


def hc_split_sinkhorn(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.reference.hc_split_sinkhorn`."""
    m, device = len(mixes), mixes.device
    pre, post, comb = (torch.empty(m, *shape, device=device) for shape in ((n,), (n,), (n, n)))
    if m:
        hc_split_sinkhorn_kernel(n=n, iterations=iterations, eps=eps)(mixes.contiguous(), scale, base, pre, post, comb)
    return pre, post, comb


def hc_pre(h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.hc_pre`."""
    m, n, d = h.shape
    x = torch.empty(m, d, dtype=h.dtype, device=h.device)
    if m:
        hc_pre_kernel(n=n, d=d, dtype=type_name(h))(h.contiguous(), pre, x)
    return x


def hc_post(x: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.hc_post`."""
    m, n, d = h.shape
    y = torch.empty_like(h, memory_format=torch.contiguous_format)
    if m:
        hc_post_kernel(n=n, d=d, dtype=type_name(h))(x.contiguous(), h.contiguous(), post, comb, y)
    return y
