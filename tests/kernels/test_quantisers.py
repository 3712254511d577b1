"""Quantisers and weight formats by their definitions: every code, every tie, any shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels.reference import gemm
from kernels.reference.scale import ceil_power_of_two, decode_scale, floor_power_of_two

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SEEDS = st.integers(0, 2**31)


def _wide(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values of many magnitudes, some zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) * torch.exp2(torch.randint(-12, 12, shape, generator=g).float())
    return torch.where(torch.rand(*shape, generator=g) < 0.1, 0.0, x).to(dtype)


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_powers_of_two_around_a_number(value: float) -> None:
    x = torch.tensor([value])
    assert float(ceil_power_of_two(x)) == 2.0 ** math.ceil(math.log2(value)) or value == float(ceil_power_of_two(x))
    mantissa, exponent = math.frexp(value)
    assert float(ceil_power_of_two(x)) == math.ldexp(1.0, exponent if mantissa > 0.5 else exponent - 1)
    assert float(floor_power_of_two(-x)) == math.ldexp(1.0, exponent - 1)


def test_every_scale_byte() -> None:
    values = decode_scale(torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert values.tolist() == [2.0 ** (e - 127) for e in range(255)]


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([64, 128]), st.sampled_from([torch.bfloat16, torch.float32]))
def test_act_quant_follows_its_definition(seed: int, block: int, dtype: torch.dtype) -> None:
    x = _wide(seed, 3, 2, 2 * block, dtype=dtype)
    q, scale = kernels.act_quant(x, block)
    blocks = x.float().view(3, 2, 2, block)
    amax = blocks.abs().amax(-1).clamp_min(1e-4)
    expected = ceil_power_of_two(amax * torch.tensor(1 / 448))
    assert torch.equal(scale.float(), expected)
    codes = (blocks / expected.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.float(), codes.float().flatten(-2))
    assert q.float().abs().max() <= 448
    kept = kernels.act_round(x, block)
    assert torch.equal(kept, (codes.float() * expected.unsqueeze(-1)).flatten(-2))
    assert torch.equal(kernels.act_round(kept, block), kept), "what is on the grid stays"


def test_act_quant_of_extremes() -> None:
    """Zeros take the smallest scale; a block whose largest value is 448 * 2^n uses the whole range."""
    q, scale = kernels.act_quant(torch.zeros(1, 128, dtype=torch.bfloat16))
    assert q.float().abs().max() == 0
    assert float(scale.float()) == 2.0**-22, "1e-4 / 448, up to a power of two"
    x = torch.full((1, 128), 448.0 * 4, dtype=torch.bfloat16)
    q, scale = kernels.act_quant(x)
    assert float(q[0, 0].float() * scale.float()) == 448.0 * 4
    assert torch.equal(kernels.act_round(x), x.float())


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_fp8_simulate_rounds_to_nearest(seed: int) -> None:
    x = _wide(seed, 5, 192)
    y = kernels.fp8_simulate(x, 64)
    assert y.dtype == x.dtype
    scale = kernels.act_quant(x, 64)[1].float().repeat_interleave(64, -1)
    allowed = torch.maximum(x.float().abs() * 2.0**-4, scale * 2.0**-10)
    assert ((y.float() - x.float()).abs() <= allowed).all(), "half of e4m3's step: three mantissa bits"


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([torch.bfloat16, torch.float32]))
def test_fp4_simulate_takes_the_nearest_code_and_even_ones_at_ties(seed: int, dtype: torch.dtype) -> None:
    x = _wide(seed, 4, 64, dtype=dtype)
    _check_fp4(x, kernels.fp4_simulate(x, 32))


def test_fp4_simulate_at_every_tie() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([*ties, *(-t for t in ties), 6.0] + [0.0] * 17).view(1, 32)
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert kernels.fp4_simulate(x)[0, :15].tolist() == [*even, *(-e for e in even), 6.0]


def test_fp4_simulate_of_zeros() -> None:
    assert kernels.fp4_simulate(torch.zeros(1, 32)).abs().max() == 0


def _check_fp4(x: torch.Tensor, y: torch.Tensor) -> None:
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).clamp_min(6 * 2.0**-126)
    scale = ceil_power_of_two(amax * torch.tensor(1 / 6)).repeat_interleave(32, -1)
    for value, got, s in zip(x.flatten().tolist(), y.flatten().tolist(), scale.flatten().tolist(), strict=True):
        distance = [abs(min(abs(value) / s, 6.0) - g) for g in GRID]
        nearest = [code for code, d in enumerate(distance) if d == min(distance)]
        code = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        assert got == math.copysign(GRID[code] * s, value) or (got == 0 and code == 0)


def test_dequant_fp4_of_every_byte() -> None:
    """Low nibble first, sign in bit 3, scale per 32 values, times."""
    weight = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scale = torch.arange(120, 136, dtype=torch.uint8).view(8, 2).view(torch.float8_e8m0fnu)
    got = kernels.dequant_fp4(weight, scale)
    for row in range(8):
        for column in range(64):
            code = (int(weight[row, column // 2]) >> 4 * (column % 2)) & 15
            value = GRID[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (120 + 2 * row + column // 32 - 127)
            assert float(got[row, column]) == value


def test_dequant_fp4_takes_signed_bytes_and_slices() -> None:
    weight, scale = _bytes(0, 6, 64), _bytes(1, 6, 4) % 254
    expected = kernels.dequant_fp4(weight, scale.view(torch.float8_e8m0fnu))
    assert torch.equal(kernels.dequant_fp4(weight.view(torch.int8), scale.view(torch.float8_e8m0fnu)), expected)
    rows = kernels.dequant_fp4(weight[2:4], scale[2:4].view(torch.float8_e8m0fnu))
    assert torch.equal(rows, expected[2:4])


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (1, 1)])
def test_dequant_fp8_scales_blocks(shape: tuple[int, int]) -> None:
    n, k = shape
    weight = (_bytes(0, n, k) % 127).view(torch.float8_e4m3fn)
    scale = (120 + _bytes(1, -(-n // 128), -(-k // 128)) % 16).view(torch.float8_e8m0fnu)
    got = kernels.dequant_fp8(weight, scale)
    blocks = scale.float()[torch.arange(n).unsqueeze(1) // 128, torch.arange(k).unsqueeze(0) // 128]
    assert torch.equal(got, weight.float() * blocks)


@pytest.mark.parametrize("m", [0, 1, 3])
def test_gemms_of_any_number_of_tokens(m: int) -> None:
    x = _wide(3, m, 256)
    a, a_scale = kernels.act_quant(x)
    w8, s8 = (_bytes(4, 128, 256) % 127).view(torch.float8_e4m3fn), torch.full((1, 2), 127, dtype=torch.uint8)
    w4, s4 = _bytes(5, 128, 128), torch.full((128, 8), 126, dtype=torch.uint8)
    s8, s4 = s8.view(torch.float8_e8m0fnu), s4.view(torch.float8_e8m0fnu)
    for got, weight in (
        (kernels.fp8_gemm(a, a_scale, w8, s8), kernels.dequant_fp8(w8, s8)),
        (kernels.fp4_gemm(a, a_scale, w4, s4), kernels.dequant_fp4(w4, s4)),
    ):
        expected = kernels.act_round(x).double() @ weight.double().T
        assert got.shape == (m, 128)
        assert got.dtype == torch.bfloat16
        assert torch.allclose(got.double(), expected, rtol=2.0**-7, atol=1e-4 * float(expected.abs().max()) if m else 0)


@pytest.mark.parametrize("values", [1 << 9, 1 << 11, 1 << 13, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_fp4_products_do_not_depend_on_company_or_shape(
    values: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of rows, one weight or all at once: the same values; to the bit where the rows stay together."""
    monkeypatch.setattr(gemm, "BLOCK_VALUES", values)
    n, k = 24, 128
    xs = [_wide(i, 1 + i, k, dtype=torch.float32) for i in range(count)]
    ws, scales = (
        [_bytes(10 + i, n, k // 2) for i in range(count)],
        [_bytes(20 + i, n, k // 32) % 16 + 120 for i in range(count)],
    )
    together = kernels.fp4_linears([(x, w.flatten(), s.flatten()) for x, w, s in zip(xs, ws, scales, strict=True)])
    assert len(together) == count
    for x, w, s, got in zip(xs, ws, scales, together, strict=True):
        assert torch.equal(got, kernels.fp4_linear(x, w, s.view(torch.float8_e8m0fnu)))
        expected = x.double() @ kernels.dequant_fp4(w, s.view(torch.float8_e8m0fnu)).double().T
        assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("limit", [448.0, 6.0])
def test_scale_from_bits_is_that_of_the_float32_product(limit: float) -> None:
    """For every mantissa: 2^ceil(log2(amax * fp32(1 / limit))), as the definition has it."""
    amax = (torch.arange(1 << 23, dtype=torch.int32) | 127 << 23).view(torch.float32)
    product = amax * torch.tensor(1 / limit)
    assert torch.equal(ceil_power_of_two(amax, limit), ceil_power_of_two(product))
