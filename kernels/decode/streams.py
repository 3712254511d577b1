"""Hyper-connections of a decode step: into the residual streams, and from them to the next sublayer's input."""

from typing import Any

import tilelang.language as T

from kernels.decode.source import call, source
from kernels.tile import tile_kernel

STREAMS = 4
COLUMNS = 32
"""Columns of a block that writes streams; each leaves one part of the next projection's sums."""
LAYER_MIXES = 24
"""Numbers that set the mixing around a sublayer; at the head it is 4."""


def _read_threads(d: int) -> int:
    threads = min(512, max(32, d // 8))
    assert threads % 32 == 0, f"streams of {d} are not read by whole warps"
    return threads


@tile_kernel({"d": 4096, "s": 1, "vocab": 129280}, {"d": 128, "s": 4, "vocab": 512})
def streams_start(d: int, s: int, vocab: int) -> Any:
    """Streams of the tokens' embeddings, and the parts of the first projection."""

    @T.prim_func
    def streams_start(
        tokens: T.Tensor((s,), "int32"),
        embedding: T.Tensor((vocab, d), "bfloat16"),
        streams: T.Tensor((s, STREAMS, d), "bfloat16"),
        fn: T.Tensor((LAYER_MIXES, STREAMS * d), "float32"),
        parts: T.Tensor((s, d // COLUMNS, LAYER_MIXES + 1), "float32"),
    ) -> None:
        with T.Kernel(d // COLUMNS, threads=STREAMS * COLUMNS, prelude=source()):
            call("streams_start", (d, s, LAYER_MIXES), tokens, embedding, streams, fn, parts)

    return streams_start


@tile_kernel({"d": 4096, "s": 1}, {"d": 128, "s": 4})
def attention_write(d: int, s: int) -> Any:
    """The attention's output into the streams, in place, and the parts of the expert half's projection."""

    @T.prim_func
    def attention_write(
        y: T.Tensor((s, d), "bfloat16"),
        streams: T.Tensor((s, STREAMS, d), "bfloat16"),
        post: T.Tensor((s, STREAMS), "float32"),
        comb: T.Tensor((s, STREAMS, STREAMS), "float32"),
        fn: T.Tensor((LAYER_MIXES, STREAMS * d), "float32"),
        parts: T.Tensor((s, d // COLUMNS, LAYER_MIXES + 1), "float32"),
    ) -> None:
        with T.Kernel(d // COLUMNS, threads=STREAMS * COLUMNS, prelude=source()):
            call("attention_write", (d, s, LAYER_MIXES), y, streams, post, comb, fn, parts)

    return attention_write


@tile_kernel(
    {"d": 4096, "s": 1, "eps": 1e-6, "hc_eps": 1e-6, "iterations": 20},
    {"d": 128, "s": 4, "eps": 1e-6, "hc_eps": 1e-6, "iterations": 20},
)
def sublayer_read(d: int, s: int, eps: float, hc_eps: float, iterations: int) -> Any:
    """A sublayer's normed input, plain and quantised, and the numbers that will take its output in."""
    threads = _read_threads(d)

    @T.prim_func
    def sublayer_read(
        streams: T.Tensor((s, STREAMS, d), "bfloat16"),
        parts: T.Tensor((s, d // COLUMNS, LAYER_MIXES + 1), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((LAYER_MIXES,), "float32"),
        norm: T.Tensor((d,), "float32"),
        x: T.Tensor((s, d), "bfloat16"),
        codes: T.Tensor((s, d), "uint8"),
        halves: T.Tensor((s, d), "float16"),
        scales: T.Tensor((s, d // 128), "float32"),
        post: T.Tensor((s, STREAMS), "float32"),
        comb: T.Tensor((s, STREAMS, STREAMS), "float32"),
    ) -> None:
        with T.Kernel(2, s, threads=threads, prelude=source()):
            call(
                "sublayer_read",
                (d, threads),
                *(streams, parts, scale, base, norm, eps, hc_eps, iterations, x, codes, halves, scales, post, comb),
            )

    return sublayer_read


@tile_kernel({"d": 4096, "s": 1, "eps": 1e-6, "hc_eps": 1e-6}, {"d": 128, "s": 4, "eps": 1e-6, "hc_eps": 1e-6})
def head_read(d: int, s: int, eps: float, hc_eps: float) -> Any:
    """The head's normed input; quantised as well, which nobody needs."""
    threads = _read_threads(d)

    @T.prim_func
    def head_read(
        streams: T.Tensor((s, STREAMS, d), "bfloat16"),
        parts: T.Tensor((s, d // COLUMNS, STREAMS + 1), "float32"),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((STREAMS,), "float32"),
        norm: T.Tensor((d,), "float32"),
        x: T.Tensor((s, d), "bfloat16"),
        codes: T.Tensor((s, d), "uint8"),
        scales: T.Tensor((s, d // 128), "float32"),
    ) -> None:
        with T.Kernel(1, s, threads=threads, prelude=source()):
            call("head_read", (d, threads), streams, parts, scale, base, norm, eps, hc_eps, x, codes, scales)

    return head_read
