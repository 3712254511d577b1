"""From logits to the next token, on the device; the draw depends on seed and position alone."""

from typing import Any

import tilelang.language as T

from kernels.decode.experts import OWN_WORDS
from kernels.decode.hints import HINT_WORDS, HINTED_WORDS, HINTS
from kernels.decode.source import call, source
from kernels.tile import tile_kernel

BLOCKS = 64
STEPS = 64
"""Steps whose tokens the log keeps."""
SAMPLING_WORDS = 6
"""Of `Sampling` in sampling.cuh: temperature, top_p, min_p (float32), top_k (int32), seed (uint64)."""


@tile_kernel({"vocab": 129280, "s": 1})
def sample_threshold(vocab: int, s: int) -> Any:
    """The smallest logit that top-k, top-p and min-p let pass; -inf if none is set."""

    @T.prim_func
    def sample_threshold(
        logits: T.Tensor((s, vocab), "float32"),
        sampling: T.Tensor((s, SAMPLING_WORDS), "int32"),
        threshold: T.Tensor((s,), "float32"),
    ) -> None:
        with T.Kernel(s, threads=1024, prelude=source()):
            call("sample_threshold", (vocab,), logits, sampling, threshold)

    return sample_threshold


@tile_kernel(
    {"vocab": 129280, "s": 1, "hash_layers": 3, "experts": 256, "topk": 6},
    {"vocab": 512, "s": 4, "hash_layers": 0, "experts": 16, "topk": 4},
)
def sample(vocab: int, s: int, hash_layers: int, experts: int, topk: int) -> Any:
    """Draws the next tokens, moves positions on, notes the tokens in the log, and hints at what they want of the first
    `hash_layers` layers by `hashed`."""
    layers = T.dynamic("layers")

    @T.prim_func
    def sample(
        logits: T.Tensor((s, vocab), "float32"),
        sampling: T.Tensor((s, SAMPLING_WORDS), "int32"),
        threshold: T.Tensor((s,), "float32"),
        best: T.Tensor((s, BLOCKS, 2), "int32"),
        done: T.Tensor((s,), "uint32"),
        tokens: T.Tensor((s,), "int32"),
        positions: T.Tensor((s,), "int32"),
        step: T.Tensor((s,), "int32"),
        log: T.Tensor((STEPS, s), "int32"),
        hashed: T.Tensor((max(hash_layers, 1), vocab if hash_layers else 1, topk), "int16"),
        table: T.Tensor((layers, experts), "int32"),
        own: T.Tensor((OWN_WORDS,), "int64"),
        hints: T.Tensor((HINTS, HINT_WORDS), "int32"),
        hinted: T.Tensor((HINTED_WORDS,), "int32"),
    ) -> None:
        with T.Kernel(BLOCKS, s, threads=256, prelude=source()):
            call(
                "sample",
                (vocab, s, STEPS, hash_layers, experts, topk),
                *(logits, sampling, threshold, best, done, tokens, positions, step, log),
                *(hashed, table, own, hints, hinted),
            )

    return sample
