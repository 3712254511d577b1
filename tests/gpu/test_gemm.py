"""Products with FP8, FP4 and bfloat16 weights against recorded vectors, double precision and every stored code."""

from __future__ import annotations

import pytest
import torch
from helpers import op_goldens
from helpers.matrices import CUDA, activations, fp4_weight, fp8_weight, near, normal, twice

import kernels
from kernels.reference import act_quant, dequant_fp4, dequant_fp8

ROWS = (0, 1, 2, 7, 64, 65, 513)
SHAPES = [((1024, 512), 4096), ((256,), 1024), ((80, 128), 128), ((4096,), 256)]


@pytest.mark.parametrize("name", op_goldens.names("fp8_gemm") + op_goldens.names("fp4_gemm"))
def test_recorded(name: str) -> None:
    op_goldens.check_gemm(name, CUDA)


@pytest.mark.parametrize(("sources", "k"), SHAPES)
def test_fp8_linear(sources: tuple[int, ...], k: int) -> None:
    """Some sources are cut inside a block of 128 rows."""
    weights = [fp8_weight(seed, n, k) for seed, n in enumerate(sources)]
    prepared = kernels.prepare_fp8(*weights)
    exact = torch.cat([dequant_fp8(*weight) for weight in weights]).double()
    x = activations(9, max(ROWS), k)
    whole = twice(lambda: kernels.fp8_linear(x, prepared, torch.float32))
    near(whole, x.double() @ exact.T, 1e-5)
    for m in ROWS:
        y = twice(lambda m=m: kernels.fp8_linear(x[:m], prepared, torch.float32))
        assert torch.equal(y, whole[:m]), "a row's bits depend on the others"
    assert torch.equal(kernels.fp8_linear(x, prepared, torch.bfloat16), whole.bfloat16())
    strided = torch.cat((x, x), 1)[:, :k].unflatten(0, (3, -1))
    assert torch.equal(kernels.fp8_linear(strided, prepared, torch.float32), whole.unflatten(0, (3, -1)))


def test_fp8_linear_in_float32() -> None:
    """The comparison mode: no TF32."""
    weight = fp8_weight(0, 256, 1024)
    x = normal(1, 33, 1024)
    y = kernels.fp8_linear(x, kernels.prepare_fp8(weight), torch.float32)
    near(y, x.double() @ dequant_fp8(*weight).double().T, 1e-6)


@pytest.mark.parametrize(("n", "k"), [(2624, 4096), (64, 4096), (16, 128), (512, 384)])
def test_float_linear(n: int, k: int) -> None:
    weight, x = normal(0, n, k).bfloat16(), normal(1, max(ROWS), k).bfloat16()
    whole = twice(lambda: kernels.float_linear(x, weight))
    near(whole, x.double() @ weight.double().T, 1e-5)
    for m in ROWS:
        assert torch.equal(twice(lambda m=m: kernels.float_linear(x[:m], weight)), whole[:m])
    exact = kernels.float_linear(x.float(), weight)
    near(exact, x.double() @ weight.double().T, 1e-6)


@pytest.mark.parametrize(("n", "k"), [(4096, 2048), (256, 128)])
def test_fp4_gemm(n: int, k: int) -> None:
    weight = fp4_weight(0, n, k)
    a, a_scale = act_quant(normal(1, max(ROWS), k).bfloat16())
    x = (a.float().unflatten(-1, (-1, 128)) * a_scale.float().unsqueeze(-1)).flatten(-2)
    whole = twice(lambda: kernels.fp4_gemm(a, a_scale, *weight))
    near(whole, x.double() @ dequant_fp4(*weight).double().T, 2e-3)
    for m in ROWS:
        assert torch.equal(twice(lambda m=m: kernels.fp4_gemm(a[:m], a_scale[:m], *weight)), whole[:m])


@pytest.mark.parametrize("exponent", [20, 64, 119, 120, 127, 128, 200, 240])
def test_every_fp8_code(exponent: int) -> None:
    """A unit matrix shows the weights: all codes but NaN, exact, subnormal codes and far scales included."""
    codes = torch.arange(256, dtype=torch.uint8, device=CUDA)
    codes[codes & 0x7F == 0x7F] = 0
    weight = codes.view(2, 128).repeat(64, 1).view(torch.float8_e4m3fn)
    scale = torch.tensor([[exponent]], dtype=torch.uint8, device=CUDA).view(torch.float8_e8m0fnu)
    unit = torch.eye(128, device=CUDA, dtype=torch.bfloat16)
    y = kernels.fp8_linear(unit, kernels.prepare_fp8((weight, scale)), torch.float32)
    assert torch.equal(y.T, dequant_fp8(weight, scale))


@pytest.mark.parametrize("exponent", [2, 20, 119, 127, 128, 200, 250])
def test_every_fp4_code(exponent: int) -> None:
    """In every place of a byte and of a block of 32."""
    weight = torch.arange(256, dtype=torch.uint8, device=CUDA).repeat(32).view(128, 64)
    scale = torch.full((128, 4), exponent, dtype=torch.uint8, device=CUDA)
    scale[:, 1] += 1
    a, a_scale = act_quant(torch.eye(128, device=CUDA, dtype=torch.bfloat16))
    y = kernels.fp4_gemm(a, a_scale, weight, scale.view(torch.float8_e8m0fnu))
    assert torch.equal(y.T.float(), dequant_fp4(weight, scale.view(torch.float8_e8m0fnu)))
