"""Rotary positions by their formula in double precision, and YaRN's ramp as published for this model."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

import kernels


def test_frequencies() -> None:
    got = kernels.rope_frequencies(64, 10000.0)
    expected = torch.tensor([10000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert torch.allclose(got.double(), expected, rtol=1e-6)


def test_yarn_ramp_of_the_published_model() -> None:
    """Pairs up to 15 keep their frequency, from 25 on it is a sixteenth, between lies a line."""
    plain = kernels.rope_frequencies(64, 160000.0).double()
    got = kernels.yarn_frequencies(64, 160000.0, 16.0, 32.0, 1.0, 65536).double()
    ramp = ((torch.arange(32) - 15) / 10).clamp(0, 1).double()
    assert torch.allclose(got, plain / 16 * ramp + plain * (1 - ramp), rtol=1e-6)
    assert torch.equal(got[:16], plain[:16])
    assert torch.equal(got[25:], plain[25:] / 16)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_rotates_interleaved_pairs_at_the_end(inverse: bool, heads: tuple[int, ...]) -> None:
    table = kernels.rope_table(kernels.rope_frequencies(8, 100.0), 20)
    x = torch.randn(5, *heads, 12, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    got = kernels.rope(x, table[7:12], inverse=inverse)
    assert torch.equal(x, before), "the input is left alone"
    assert torch.equal(got[..., :4], x[..., :4])
    for token in range(5):
        for i in range(4):
            angle = (7 + token) * 100.0 ** (-2 * i / 8) * (-1 if inverse else 1)
            pair = x[token, ..., 4 + 2 * i : 6 + 2 * i].reshape(-1, 2).tolist()
            turned = [complex(*p) * cmath.exp(1j * angle) for p in pair]
            mine = got[token, ..., 4 + 2 * i : 6 + 2 * i].reshape(-1, 2).tolist()
            assert all(abs(complex(*a) - b) < 1e-5 for a, b in zip(mine, turned, strict=True))


def test_rounds_once() -> None:
    table = kernels.rope_table(kernels.rope_frequencies(64, 10000.0), 300)
    x = torch.randn(300, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(kernels.rope(x, table), kernels.rope(x.float(), table).bfloat16())


def test_takes_columns_of_a_wider_tensor() -> None:
    table = kernels.rope_table(kernels.rope_frequencies(4, 10.0), 3)
    wide = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    assert torch.equal(kernels.rope(wide[:, 8:], table), kernels.rope(wide[:, 8:].contiguous(), table))


def test_angle_is_a_float32_product() -> None:
    """At a million positions the rounding of the product is visible, and part of the model."""
    frequency, position = kernels.rope_frequencies(64, 10000.0), 1_000_000
    table = kernels.rope_table(frequency, position + 1)
    for i in range(32):
        angle = float(torch.tensor(float(position)) * frequency[i])
        assert abs(complex(table[position, i]) - complex(math.cos(angle), math.sin(angle))) < 1e-6
