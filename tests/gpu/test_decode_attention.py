"""What a decode step does before its attention, against torch twins: caches take in a token, entries are chosen.

Inputs are made and twins run on the CPU. A kernel adds in another order, so a value may fall to the other side of a
rounding; that is counted, not tolerated everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from helpers.decode import CUDA, equal_but_for_roundings, poisoned

from kernels.reference import decode as twin
from kernels.reference import hadamard_fp4, rope_frequencies, rope_table
from kernels.reference import index_topk as topk_twin

ROPE = 64
EPS = 1e-6
POSITIONS = (3, 128, 4, 127)
"""What closes a group, and what opens one: a sequence's first group, and one with another before it."""
TOKENS = (1, 2)


class Sizes(NamedTuple):
    q: int
    d: int
    window: int
    index_d: int
    index_heads: int


PUBLISHED = Sizes(1024, 512, 128, 128, 64)
SMALL = Sizes(128, 128, 32, 64, 16)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def random_pooling(ratio: int, d: int) -> twin.Pooling:
    from kernels.decode.attention import compressor_width

    return twin.Pooling(torch.rand(d) + 0.5, torch.randn(ratio, compressor_width(ratio, d)))


def rows_before(position: int, ratio: int, d: int) -> torch.Tensor:
    """A compressor's rows [2, tokens, width] after so many tokens; NaN where they will be written first."""
    from kernels.decode.attention import compressor_rows, compressor_width

    rows = nan(2, compressor_rows(ratio), compressor_width(ratio, d))
    own = rows.shape[1] - ratio
    rows[:, : own + position % ratio] = torch.randn(2, own + position % ratio, rows.shape[2])
    if position < ratio:  # there is no group before
        rows[0, :own], rows[1, :own] = 0, -torch.inf
    return rows


def caches_before(sizes: Sizes, ratio: int, position: int) -> twin.LayerCaches:
    """Of one sequence, as `LayerTensors` of a decode step has them; nothing reads keys, so all of them are NaN."""
    entries, group = 160 // ratio if ratio else 0, ratio or 1
    return twin.LayerCaches(
        nan(sizes.window + entries, sizes.d, dtype=torch.bfloat16),
        rows_before(position, group, sizes.d),
        nan(entries if ratio == 4 else 1, sizes.index_d, dtype=torch.bfloat16),
        rows_before(position, group, sizes.index_d),
    )


@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("sizes", [PUBLISHED, SMALL], ids=["published", "small"])
def test_attention_inputs(sizes: Sizes, ratio: int, s: int) -> None:
    """Query, key, compressors' rows and entries of every sequence; and nothing else is written."""
    from kernels.decode.attention import attention_inputs, num_inputs

    q, d, window, index_d, index_heads = sizes
    n = num_inputs(q, d, ratio, index_d, index_heads)
    kernel = attention_inputs(**sizes._asdict(), rope=ROPE, ratio=ratio, s=s, eps=EPS)
    q_norm, kv_norm = torch.rand(q) + 0.5, torch.rand(d) + 0.5
    poolings = [random_pooling(ratio or 1, width) for width in (d, index_d)]
    frequencies = rope_frequencies(ROPE, 160000.0)
    rotations = rope_table(frequencies, max(POSITIONS) + 1)
    for begin in range(0, len(POSITIONS), s):
        positions = POSITIONS[begin : begin + s]
        y = torch.randn(s, n) * 3
        y[:, : q + d] = y[:, : q + d].bfloat16().float()  # as FP8 rows leave it
        before = [caches_before(sizes, ratio, position) for position in positions]
        caches = twin.LayerCaches(*(torch.stack(parts).to(CUDA) for parts in zip(*before, strict=True)))
        codes, scales = poisoned(s, q, dtype=torch.uint8), poisoned(s, q // 128)
        weights = (q_norm, kv_norm, *poolings[0], *poolings[1], frequencies)
        at = torch.tensor(positions, dtype=torch.int32, device=CUDA)
        kernel(y.to(CUDA), at, *(weight.to(CUDA) for weight in weights), codes, scales, *caches)
        for i, position in enumerate(positions):
            own = poolings[: {0: 0, 4: 2, 128: 1}[ratio]]
            expected = twin.attention_inputs(
                y[i], position, q_norm, kv_norm, own, rotations, before[i], window=window, eps=EPS
            )
            got = twin.AttentionInputs(codes[i].cpu(), scales[i].cpu(), twin.LayerCaches(*(c[i].cpu() for c in caches)))
            check_inputs(got, expected)


def check_inputs(got: twin.AttentionInputs, expected: twin.AttentionInputs) -> None:
    """Steps of the grids, of the largest value: FP8 has 8 between powers of two, FP4 none between 4 and 6."""
    assert torch.equal(got.scales, expected.scales)
    fp8 = torch.float8_e4m3fn
    equal_but_for_roundings(got.codes.view(fp8), expected.codes.view(fp8), 1 / 8)
    equal_but_for_roundings(got.caches.keys, expected.caches.keys, 1 / 8)
    equal_but_for_roundings(got.caches.index_keys, expected.caches.index_keys, 1 / 2)
    for name in ("compressor", "index_compressor"):
        rows, expected_rows = getattr(got.caches, name), getattr(expected.caches, name)
        torch.testing.assert_close(rows, expected_rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "d", "topk", "counts"),
    [
        (64, 128, 512, (513,)),
        (64, 128, 512, (2000, 512)),
        (16, 64, 16, (16,)),
        (16, 64, 16, (17,)),
        (16, 64, 16, (200, 65)),
        (16, 64, 16, (16, 64)),
    ],
)
def test_index_scores(heads: int, d: int, topk: int, counts: tuple[int, ...]) -> None:
    """Scores of all entries that a sequence has, none of others, and none at all where nothing is to be chosen."""
    from kernels.decode.indexer import ENTRIES, index_scores

    s, entries, own, n = len(counts), max(counts) + 3, 256, 64 + heads
    positions = [4 * count + 2 for count in counts]
    frequencies = rope_frequencies(ROPE, 160000.0)
    rotations = rope_table(frequencies, max(positions) + 1)
    sizes = {"heads": heads, "d": d, "rope": ROPE, "topk": topk, "s": s, "blocks": -(-entries // ENTRIES)}
    kernel = index_scores(**sizes, q_stride=own + heads * d, w_stride=n)
    at, turns = torch.tensor(positions, dtype=torch.int32, device=CUDA), frequencies.to(CUDA)
    errors = []
    for _ in range(8):
        keys = hadamard_fp4(torch.randn(s, entries, d).bfloat16())
        for i, count in enumerate(counts):
            keys[i, count:] = torch.nan
        q, w = nan(s, own + heads * d), nan(s, n)  # what lies before them is others' business
        q[:, own:] = torch.randn(s, heads * d).bfloat16().float()
        w[:, -heads:] = torch.randn(s, heads)
        scores = poisoned(s, entries)
        kernel(q.to(CUDA)[:, own:], w.to(CUDA)[:, n - heads :], at, keys.to(CUDA), turns, scores)
        for i, count in enumerate(counts):
            seen = count if count > topk else 0
            assert scores[i, seen:].isnan().all()
            if seen:
                query, rotation = q[i, own:].view(heads, d), rotations[positions[i]]
                expected = twin.index_scores(query, w[i, -heads:], keys[i, :count], rotation)
                errors.append(float((scores[i, :count].cpu() - expected).norm() / expected.norm()))
    assert all(error < 0.05 for error in errors), "more than single values of the query, one FP4 step off"
    assert sum(error > 1e-4 for error in errors) <= len(errors) // 4, "most queries have no such value"


@pytest.mark.parametrize(
    ("topk", "counts"),
    [
        *((512, (count,)) for count in (17, 512, 513, 700, 5000, 40000)),
        *((16, counts) for counts in ((16,), (17,), (250,), (130, 16), (16, 64), (40, 41))),
    ],
)
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "negative"])
def test_index_topk(topk: int, counts: tuple[int, ...], kind: str) -> None:
    from kernels.decode.indexer import index_topk

    s = len(counts)
    scores = torch.randn(s, max(counts) + 3)
    scores = {"random": scores, "ties": (scores * 3).round(), "equal": scores * 0, "negative": -scores.abs()}[kind]
    for row, count in zip(scores, counts, strict=True):
        row[count:] = torch.inf  # of entries that the sequence does not have yet
    chosen = torch.full((s, topk), -7, device=CUDA, dtype=torch.int32)
    positions = torch.tensor([4 * count - 1 for count in counts], device=CUDA, dtype=torch.int32)
    index_topk(topk=topk, s=s)(scores.to(CUDA), positions, chosen)
    for i, count in enumerate(counts):
        if count <= topk:
            assert (chosen[i] == -7).all()
            continue
        visible = torch.ones(1, count, dtype=torch.bool)
        expected = topk_twin(scores[i : i + 1, :count], visible, topk)[0].nonzero().squeeze(-1)
        assert torch.equal(chosen[i].long().cpu(), expected)
