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


class Choosing(NamedTuple):
    """Inputs of `index_choice` for sequences with so many entries; NaN where it has no business."""

    heads: int
    topk: int
    counts: tuple[int, ...]
    q: torch.Tensor
    w: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def random(cls, heads: int, d: int, topk: int, counts: tuple[int, ...]) -> Choosing:
        s, entries, own = len(counts), max(counts) + 3, 256
        keys = hadamard_fp4(torch.randn(s, entries, d).bfloat16())
        for i, count in enumerate(counts):
            keys[i, count:] = torch.nan
        q, w = nan(s, own + heads * d), nan(s, 64 + heads)  # what lies before them is others'
        q[:, own:] = torch.randn(s, heads * d).bfloat16().float()
        w[:, 64:] = torch.randn(s, heads)
        return cls(heads, topk, counts, q, w, keys)

    @property
    def positions(self) -> list[int]:
        return [4 * count + 2 for count in self.counts]

    def run(self, done: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, NaN where none were written, and choices, -7 where none were made."""
        from kernels.decode.indexer import ENTRIES, index_choice

        (s, entries, d), own = self.keys.shape, 256
        kernel = index_choice(
            heads=self.heads,
            d=d,
            rope=ROPE,
            topk=self.topk,
            s=s,
            blocks=-(-entries // ENTRIES),
            q_stride=self.q.shape[1],
            w_stride=self.w.shape[1],
        )
        at = torch.tensor(self.positions, dtype=torch.int32, device=CUDA)
        scores, chosen = poisoned(s, entries), torch.full((s, self.topk), -7, device=CUDA, dtype=torch.int32)
        inputs = self.q.to(CUDA)[:, own:], self.w.to(CUDA)[:, 64:], at, self.keys.to(CUDA)
        kernel(*inputs, rope_frequencies(ROPE, 160000.0).to(CUDA), scores, done, chosen)
        return scores.cpu(), chosen.cpu().long()

    def expected_scores(self, i: int, rotations: torch.Tensor) -> torch.Tensor:
        d, count = self.keys.shape[2], self.counts[i]
        query = self.q[i, 256:].view(self.heads, d)
        return twin.index_scores(query, self.w[i, 64:], self.keys[i, :count], rotations[self.positions[i]])


CHOICES = [
    *((64, 128, 512, counts) for counts in ((512,), (513,), (2000, 512), (640, 700, 40, 5000))),
    *((16, 64, 16, counts) for counts in ((16,), (17,), (200, 65), (16, 64), (40, 41), (250, 5000))),
]
"""Heads, their size, how many are chosen, and entries of each sequence: of one block and of many, full and not."""


@pytest.mark.parametrize(("heads", "d", "topk", "counts"), CHOICES)
def test_index_scores(heads: int, d: int, topk: int, counts: tuple[int, ...]) -> None:
    """Of all entries that a sequence has, none of others, and none at all where nothing is to be chosen."""
    done = torch.zeros(len(counts), dtype=torch.uint32, device=CUDA)
    rotations = rope_table(rope_frequencies(ROPE, 160000.0), 4 * max(counts) + 3)
    errors = []
    for _ in range(8):
        inputs = Choosing.random(heads, d, topk, counts)
        scores, _ = inputs.run(done)
        for i, count in enumerate(counts):
            seen = count if count > topk else 0
            assert scores[i, seen:].isnan().all()
            if seen:
                expected = inputs.expected_scores(i, rotations)
                errors.append(float((scores[i, :seen] - expected).norm() / expected.norm()))
    assert all(error < 0.05 for error in errors), "more than single values of the query, one FP4 step off"
    assert sum(error > 1e-4 for error in errors) <= len(errors) // 4, "most queries have no such value"


@pytest.mark.parametrize(("heads", "d", "topk", "counts"), [*CHOICES, (64, 128, 512, (40000,))])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "negative"])
def test_index_choice(heads: int, d: int, topk: int, counts: tuple[int, ...], kind: str) -> None:
    """The best by the kernel's own scores, ascending, of equal ones the first; again, with nothing left behind."""
    inputs = Choosing.random(heads, d, topk, counts)
    if kind in ("ties", "equal"):
        few = 9 if kind == "ties" else 1
        for own, count in zip(inputs.keys, counts, strict=True):
            own[:count] = own[torch.randint(min(few, count), (count,))]
    if kind == "negative":
        inputs.w[:, 64:] = -inputs.w[:, 64:].abs()
    done = torch.zeros(len(counts), dtype=torch.uint32, device=CUDA)
    for _ in range(3):
        scores, chosen = inputs.run(done)
        for i, count in enumerate(counts):
            if count <= topk:
                assert (chosen[i] == -7).all()
                continue
            visible = torch.ones(1, count, dtype=torch.bool)
            expected = topk_twin(scores[i : i + 1, :count], visible, topk)[0].nonzero().squeeze(-1)
            assert torch.equal(chosen[i], expected)
        assert not done.view(torch.int32).any()
