"""The expert half of a decode step, addressed through slots: routing and look-up, then up, down and sum.

`routing` is what the router leaves for the kernels behind it, int32 [routing_words]: see `Routing` in experts.cuh.
"""

from typing import Any

import tilelang.cuda.language as cuda
import tilelang.language as T

from kernels.decode.hints import HINT_WORDS, HINTED_WORDS, HINTS
from kernels.decode.linear import num_warps
from kernels.decode.source import call, source
from kernels.decode.streams import COLUMNS, STREAMS
from kernels.tile import tile_kernel

OWN_WORDS = 3
"""What the GPU itself keeps, int64: the clock, how many tickets, microseconds of waits; see `Own` in experts.cuh."""

# Shapes of blocks, the fastest on an H200 that spill no register: warps that share the inputs, tiles of 16 rows, blocks
# of 128 inputs whose weights are loaded ahead, and how many of them a multiprocessor's registers must hold at once.
UP_WARPS, UP_AHEAD, UP_AT_ONCE = 4, 2, 4
DOWN_WARPS, DOWN_TILES, DOWN_AHEAD, DOWN_AT_ONCE = 4, 4, 2, 3

_PUBLISHED = {"experts": 256, "topk": 6, "stride": 4608, "offset": 4096, "scaling": 1.5, "s": 1}
_TINY = {"experts": 24, "topk": 4, "stride": 320, "offset": 256, "scaling": 1.5, "s": 4}


def routing_words(topk: int, s: int) -> int:
    """Count; experts by position; positions and slots in the order of computing; weights and use by every token."""
    positions = topk * s
    return 1 + 3 * positions + 2 * positions * s


@tile_kernel(
    _PUBLISHED | {"hashed": False, "vocab": 1, "guesses": True},
    _PUBLISHED | {"hashed": True, "vocab": 129280, "guesses": True},
    _PUBLISHED | {"hashed": False, "vocab": 1, "guesses": False, "stride": 4352},
    _TINY | {"hashed": False, "vocab": 1, "guesses": True},
)
def route(
    experts: int,
    topk: int,
    stride: int,
    offset: int,
    hashed: bool,
    scaling: float,
    s: int,
    vocab: int,
    guesses: bool,
) -> Any:
    """Chooses and weighs experts, looks their slots up, writes a ticket if one is missing and counts the uses.

    If it `guesses`, the products behind the gate's own are those of the gate of layer `following`, -1 for none, and the
    missing experts that this one would choose become a hint, while `is_wanted` is not 0.
    """
    layers, tickets, words = T.dynamic("layers"), T.dynamic("tickets"), T.dynamic("words")

    @T.prim_func
    def route(
        layer: T.int32,
        following: T.int32,
        y: T.Tensor((s, stride), "float32"),
        bias: T.Tensor((experts,), "float32"),
        following_bias: T.Tensor((experts,), "float32"),
        tid2eid: T.Tensor((vocab, topk), "int64"),
        tokens: T.Tensor((s,), "int32"),
        table: T.Tensor((layers, experts), "int32"),
        num_tickets: T.Tensor((1,), "int64"),
        ring: T.Tensor((tickets, words), "int32"),
        uses: T.Tensor((layers, experts), "int64"),
        counts: T.Tensor((layers, experts), "int64"),
        own: T.Tensor((OWN_WORDS,), "int64"),
        waited: T.Tensor((1,), "uint32"),
        routing: T.Tensor((routing_words(topk, s),), "int32"),
        is_wanted: T.Tensor((1,), "int32"),
        hints: T.Tensor((HINTS, HINT_WORDS), "int32"),
        hinted: T.Tensor((HINTED_WORDS,), "int32"),
        guessed: T.Tensor((2, experts), "int32"),
        judged: T.Tensor((2,), "int32"),
    ) -> None:
        with T.Kernel(1 + guesses, threads=-(-experts // 32) * 32, prelude=source()):
            call(
                "route",
                (experts, topk, s, hashed, guesses),
                *(y, stride, offset, bias, tid2eid, tokens, scaling, layer, table, num_tickets, ring, uses, counts),
                *(own, waited, routing, following, following_bias, is_wanted, hints, hinted, guessed, judged),
            )

    return route


@tile_kernel(
    {"d": 4096, "width": 2048, "stride": 4608, "topk": 6, "limit": 10.0, "s": 1, "rows_per_scale": 128},
    {"d": 256, "width": 128, "stride": 320, "topk": 4, "limit": 10.0, "s": 4, "rows_per_scale": 128},
)
def experts_up(d: int, width: int, stride: int, topk: int, limit: float, s: int, rows_per_scale: int) -> Any:
    """What the routed experts activate, waiting for those on their way; and the shared expert's output."""
    warps = min(num_warps(d, UP_WARPS), num_warps(width, UP_WARPS))
    positions, half, scales_half = topk * s, width * d // 2, width * d // 32
    slots, slot_bytes, experts = T.dynamic("slots"), T.dynamic("slot_bytes"), T.dynamic("experts")

    @T.prim_func
    def experts_up(
        y: T.Tensor((s, stride), "float32"),
        shared_w2: T.Tensor((d, width), "uint8"),
        shared_scale: T.Tensor((d // rows_per_scale, width // 128), "uint8"),
        halves: T.Tensor((s, d), "float16"),
        scales: T.Tensor((s, d // 128), "float32"),
        pool: T.Tensor((slots, slot_bytes), "uint8"),
        routing: T.Tensor((routing_words(topk, s),), "int32"),
        row: T.Tensor((experts,), "int32"),
        abort: T.Tensor((1,), "int32"),
        waited: T.Tensor((1,), "uint32"),
        shared: T.Tensor((s, d), "bfloat16"),
        hidden: T.Tensor((positions, s, width), "bfloat16"),
    ) -> None:
        with T.Kernel(d // 16 + positions * width // 16, threads=32 * warps, prelude=source()):
            cuda.annotate_min_blocks_per_sm(UP_AT_ONCE)
            call(
                "experts_up",
                (d, width, s, positions, warps, UP_AHEAD, rows_per_scale),
                *(y, stride, shared_w2, shared_scale, limit, halves, scales, pool, T.cast(slot_bytes, "int64")),
                *(0, half, half + scales_half, 2 * half + scales_half, routing, row, abort, waited, shared, hidden),
            )

    return experts_up


@tile_kernel(
    {"d": 4096, "width": 2048, "topk": 6, "s": 1},
    {"d": 256, "width": 128, "topk": 4, "s": 4},
)
def experts_down(d: int, width: int, topk: int, s: int) -> Any:
    """The routed experts' outputs, routing weights included, of what `experts_up` made."""
    warps, tiles, positions = num_warps(width, DOWN_WARPS), DOWN_TILES, topk * s
    w2 = 2 * (width * d // 2 + width * d // 32)
    slots, slot_bytes = T.dynamic("slots"), T.dynamic("slot_bytes")

    @T.prim_func
    def experts_down(
        hidden: T.Tensor((positions, s, width), "bfloat16"),
        pool: T.Tensor((slots, slot_bytes), "uint8"),
        routing: T.Tensor((routing_words(topk, s),), "int32"),
        outputs: T.Tensor((positions, s, d), "bfloat16"),
    ) -> None:
        with T.Kernel(d // (16 * tiles), positions, threads=32 * warps, prelude=source()):
            cuda.annotate_min_blocks_per_sm(DOWN_AT_ONCE)
            call(
                "experts_down",
                (d, width, s, positions, tiles, warps, DOWN_AHEAD),
                *(hidden, pool, T.cast(slot_bytes, "int64"), w2, w2 + width * d // 2, routing, outputs),
            )

    return experts_down


@tile_kernel(
    {"d": 4096, "topk": 6, "mixes": 24, "s": 1},
    {"d": 256, "topk": 4, "mixes": 4, "s": 4},
)
def experts_write(d: int, topk: int, mixes: int, s: int) -> Any:
    """The experts' sum into the streams, in place; the parts of the projection behind it; the clock goes up."""
    positions = topk * s

    @T.prim_func
    def experts_write(
        routing: T.Tensor((routing_words(topk, s),), "int32"),
        outputs: T.Tensor((positions, s, d), "bfloat16"),
        shared: T.Tensor((s, d), "bfloat16"),
        clock: T.Tensor((1,), "int64"),
        own: T.Tensor((OWN_WORDS,), "int64"),
        streams: T.Tensor((s, STREAMS, d), "bfloat16"),
        post: T.Tensor((s, STREAMS), "float32"),
        comb: T.Tensor((s, STREAMS, STREAMS), "float32"),
        fn: T.Tensor((mixes, STREAMS * d), "float32"),
        parts: T.Tensor((s, d // COLUMNS, mixes + 1), "float32"),
    ) -> None:
        with T.Kernel(d // COLUMNS, threads=STREAMS * COLUMNS, prelude=source()):
            call(
                "experts_write",
                (d, s, mixes, positions),
                *(routing, outputs, shared, clock, own, streams, post, comb, fn, parts),
            )

    return experts_write
