"""The model's small operations on a GPU: recorded vectors, and their torch twins on random and on hostile values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import op_goldens

import kernels
from kernels import reference

CUDA = torch.device("cuda")
MODULES = ("activation", "compressor", "fp4", "fp8", "hyper_connection", "norm", "rotary", "router")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All sizes that the tests use, several compilers at a time."""
    from kernels.tile import KERNELS

    for module in MODULES:
        importlib.import_module(f"kernels.{module}")
    mine = [k for k in KERNELS if k.module.removeprefix("kernels.") in MODULES]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(kernel, **sizes) for kernel in mine for sizes in kernel.examples]:
            done.result()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until something is written."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch warns of the twins' products
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def normal(seed: int, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normal values of many magnitudes, some zero; the first row zeros, the second huge, the third subnormal."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) * torch.exp2(torch.randint(-12, 12, shape, generator=g).float())
    x = torch.where(torch.rand(*shape, generator=g) < 0.1, 0.0, x)
    for row, factor in zip(range(len(x)), (0.0, 2.0**100, 2.0**-130), strict=False):
        x[row] *= factor
    return x.to(dtype)


def on_gpu(operation: Callable[..., Any], *arguments: Any) -> Any:
    """Its result for the same arguments there, twice the same to the bit; on the CPU."""
    moved = [a.to(CUDA) if isinstance(a, torch.Tensor) else a for a in arguments]
    before = [a.clone() for a in moved if isinstance(a, torch.Tensor)]
    first, second = operation(*moved), operation(*moved)
    assert all(same_bits(a, b) for a, b in zip(before, filter(torch.is_tensor, moved), strict=True)), "inputs changed"
    many = isinstance(first, tuple)
    pairs = zip(first, second, strict=True) if many else [(first, second)]
    assert all(same_bits(a, b) for a, b in pairs), "two runs differ"
    return tuple(t.cpu() for t in first) if many else first.cpu()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    """To `tolerance` of the tensor's largest; of bfloat16, besides, the same but for a last bit here and there."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if not got.numel():
        return
    assert got.isfinite().all()
    difference, allowed = (got.double() - expected.double()).abs(), tolerance * max(1.0, float(expected.abs().max()))
    last_bit = 2.0**-7 * expected.double().abs() if got.dtype == BF16 else 0.0
    assert float((difference - last_bit).max()) <= allowed
    assert got.dtype == F32 or float((difference == 0).double().mean()) > 0.99


# --- recorded vectors ---


@pytest.mark.parametrize(
    "check",
    [
        op_goldens.check_act_quant,
        op_goldens.check_fp8_simulate,
        op_goldens.check_fp4_simulate,
        op_goldens.check_hadamard,
        op_goldens.check_sinkhorn,
    ],
)
def test_goldens(check: Callable[[torch.device], None]) -> None:
    check(CUDA)


# --- quantisers, bit for bit ---

SHAPES = [(0, 128), (1, 128), (2, 256), (7, 128), (64, 512), (513, 128), (3, 5, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_act_quant(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = wide(1, *shape, dtype=dtype)
    for got, expected in zip(on_gpu(kernels.act_quant, x), reference.act_quant(x), strict=True):
        assert got.shape == expected.shape
        assert same_bits(got, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [64, 128])
def test_act_round(shape: tuple[int, ...], block: int) -> None:
    """In bfloat16 here; nothing is lost."""
    x = wide(2, *shape)
    got = on_gpu(kernels.act_round, x, block)
    assert got.dtype == BF16
    assert torch.equal(got.float(), reference.act_round(x, block))
    assert same_bits(on_gpu(kernels.fp8_simulate, x, block), reference.fp8_simulate(x, block))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fp4_simulate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = wide(3, *shape, dtype=dtype)
    assert torch.equal(on_gpu(kernels.fp4_simulate, x), reference.fp4_simulate(x))


def test_fp4_simulate_at_every_tie() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = torch.cat((ties, -ties, 2 * ties, ties / 64)).bfloat16()
    assert torch.equal(on_gpu(kernels.fp4_simulate, x), reference.fp4_simulate(x))


@pytest.mark.parametrize("shape", [(0, 128), (1, 64), (7, 128), (513, 64), (9, 64, 128)])
def test_hadamard_fp4(shape: tuple[int, ...]) -> None:
    """Of small whole numbers the sums are exact in any order; of others a last bit may fall over a step of the grid."""
    whole = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(on_gpu(kernels.hadamard_fp4, whole), reference.hadamard_fp4(whole))
    x = normal(5, *shape, dtype=BF16)
    got, expected = on_gpu(kernels.hadamard_fp4, x), reference.hadamard_fp4(x)
    assert got.shape == expected.shape
    assert not got.numel() or float((got == expected).float().mean()) > 0.999


# --- norms, positions ---


@pytest.mark.parametrize("m", [0, 1, 7, 513])
@pytest.mark.parametrize("d", [512, 4096])
def test_rms_norm(m: int, d: int) -> None:
    x, weight = wide(6, m, d), normal(7, d)
    close(on_gpu(kernels.rms_norm, x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    columns = torch.cat((x, x), 1).to(CUDA)[:, d // 2 : d // 2 + d]
    got = kernels.rms_norm(columns, weight.to(CUDA), 1e-6).cpu()
    close(got, reference.rms_norm(columns.cpu(), weight, 1e-6))


@pytest.mark.parametrize(("d", "dtype"), [(512, BF16), (128, F32)])
@pytest.mark.parametrize("m", [0, 1, 7, 130])
def test_head_norm(m: int, d: int, dtype: torch.dtype) -> None:
    """Where float32 sums differ, the mean's last bit may fall otherwise, and then a whole head's values do."""
    q = normal(8, m, 4, d, dtype=dtype)
    got, expected = on_gpu(kernels.head_norm, q, 1e-6), reference.head_norm(q, 1e-6)
    assert got.dtype == dtype
    assert torch.allclose(got.float(), expected.float(), rtol=2.0**-6 if dtype == BF16 else 1e-5, atol=1e-6)
    assert not m or float((got == expected).float().mean()) > (0.95 if dtype == BF16 else 0.0)


@pytest.mark.parametrize("m", [0, 1, 7, 513])
@pytest.mark.parametrize(
    ("shape", "inverse", "dtype"), [((64, 512), False, BF16), ((512,), True, BF16), ((16, 64), False, F32)]
)
def test_rope(m: int, shape: tuple[int, ...], inverse: bool, dtype: torch.dtype) -> None:
    table = kernels.rope_table(kernels.rope_frequencies(64, 10000.0), 2000)
    x = normal(9, m, *shape, dtype=dtype)
    rotation = table[1000 : 1000 + m]
    got, expected = on_gpu(kernels.rope, x, rotation, inverse), reference.rope(x, rotation, inverse)
    close(got, expected)
    assert torch.equal(got[..., :-64], x[..., :-64])


# --- router ---


@pytest.mark.parametrize(("experts", "topk"), [(256, 6), (24, 4), (16, 4)])
@pytest.mark.parametrize("m", [0, 1, 7, 513])
def test_route_by_score(m: int, experts: int, topk: int) -> None:
    scores, bias = normal(10, m, experts).abs(), normal(11, experts)
    assert same_bits(on_gpu(kernels.route_by_score, scores, bias, topk), reference.route_by_score(scores, bias, topk))
    coarse, flat = (2 * scores).round(), torch.zeros(experts)
    ties = on_gpu(kernels.route_by_score, coarse, flat, topk)
    assert same_bits(ties, reference.route_by_score(coarse, flat, topk)), "of equals the lowest id"


def test_route_by_score_of_garbage() -> None:
    """Whatever the scores are, the choice is of experts, each once."""
    scores = torch.full((3, 16), torch.nan)
    scores[1], scores[2, ::2] = -torch.inf, torch.inf
    for row in on_gpu(kernels.route_by_score, scores, torch.zeros(16), 4).tolist():
        assert len(set(row)) == 4
        assert all(0 <= i < 16 for i in row)


@pytest.mark.parametrize("m", [0, 1, 130])
def test_router_scores(m: int) -> None:
    x, gate = normal(12, m, 4096, dtype=BF16), (normal(13, 256, 4096) / 16).bfloat16()
    close(on_gpu(kernels.router_scores, x, gate), reference.router_scores(x, gate), tolerance=1e-5)


# --- activation, pooling ---


@pytest.mark.parametrize(("width", "limit", "dtype"), [(2048, 10.0, BF16), (128, 0.5, F32)])
@pytest.mark.parametrize("m", [0, 1, 7, 130])
def test_swiglu(m: int, width: int, limit: float, dtype: torch.dtype) -> None:
    gate, up, weights = 8 * normal(14, m, width), 8 * normal(15, m, width), normal(16, m).abs()
    for w in (weights, None):
        arguments = gate.to(dtype), up.to(dtype), limit, w, dtype
        close(on_gpu(kernels.swiglu, *arguments), reference.swiglu(*arguments))


@pytest.mark.parametrize("n", [0, 1, 5])
def test_compress(n: int) -> None:
    kv, gate = normal(17, n, 128, 512), 3 * normal(18, n, 128, 512)
    close(on_gpu(kernels.compress, kv, gate), reference.compress(kv, gate))


@pytest.mark.parametrize("d", [512, 64])
@pytest.mark.parametrize("n", [0, 1, 5, 130])
def test_compress_overlapping(n: int, d: int) -> None:
    kv, gate = normal(19, n + 1, 4, 2 * d), 30 * normal(20, n + 1, 4, 2 * d)
    kv[0], gate[0] = 0, -torch.inf
    close(on_gpu(kernels.compress_overlapping, kv, gate), reference.compress_overlapping(kv, gate))


# --- hyper-connections ---

WIDTHS = [(4096, 24, BF16), (4096, 4, BF16), (128, 24, F32)]


@pytest.mark.parametrize(("d", "k", "dtype"), WIDTHS)
@pytest.mark.parametrize("m", [0, 1, 2, 7, 130])
def test_hc_mixes(m: int, d: int, k: int, dtype: torch.dtype) -> None:
    """True float32: TF32 would be a hundred times further away. A token's mixes are its own."""
    h, fn = normal(21, m, 4, d, dtype=dtype), normal(22, k, 4 * d) / (4 * d) ** 0.5
    v = h.double().flatten(1)
    expected = v @ fn.double().T / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    got = on_gpu(kernels.hc_mixes, h, fn, 1e-6)
    close(got, expected.float(), tolerance=5e-6)
    if m > 1:
        assert same_bits(on_gpu(kernels.hc_mixes, h[1:2], fn, 1e-6), got[1:2])


@pytest.mark.parametrize("m", [0, 1, 7, 513])
def test_hc_split_sinkhorn(m: int) -> None:
    mixes, scale, base = 3 * normal(23, m, 24), torch.tensor([1.0, 2.0, 0.5]), normal(24, 24)
    arguments = mixes, scale, base, 4, 20, 1e-6
    for got, expected in zip(
        on_gpu(kernels.hc_split_sinkhorn, *arguments), reference.hc_split_sinkhorn(*arguments), strict=True
    ):
        close(got, expected, tolerance=3e-6)


@pytest.mark.parametrize(("d", "dtype"), [(4096, BF16), (128, F32)])
@pytest.mark.parametrize("m", [0, 1, 7, 130])
def test_hc_pre_and_post(m: int, d: int, dtype: torch.dtype) -> None:
    h, x = normal(25, m, 4, d, dtype=dtype), normal(26, m, d, dtype=dtype)
    pre, post, comb = normal(27, m, 4), normal(28, m, 4), normal(29, m, 4, 4)
    close(on_gpu(kernels.hc_pre, h, pre), reference.hc_pre(h, pre))
    close(on_gpu(kernels.hc_post, x, h, post, comb), reference.hc_post(x, h, post, comb))
