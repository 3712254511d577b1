"""The recorded vectors of single operations (`tests/golden/ops`), and how close each must come.

As in `goldens`, a check raises AssertionError, so that the operations' tests and the proof that they notice faults run
the same code. Operations are called through `kernels`, where a test may replace them.
"""

from __future__ import annotations

import torch

import kernels
from helpers.goldens import CPU, limits, vectors


def names(operation: str) -> list[str]:
    """The recorded cases of an operation, by the prefix of their names."""
    return sorted({key.split(".")[0] for key in vectors("ops-golden") if key.startswith(operation)})


def check_act_quant(device: torch.device = CPU) -> None:
    """Codes and scales, bit for bit, and what `act_round` keeps of them."""
    x, y, scale = _tensors(device, "act_quant_block128", "x", "y", "scale")
    got_y, got_scale = kernels.act_quant(x, 128)
    _same_bits(got_y, y)
    _same_bits(got_scale, scale)
    kept = (y.float().unflatten(-1, (-1, 128)) * scale.float().unsqueeze(-1)).flatten(-2)
    assert torch.equal(kernels.act_round(x, 128).float(), kept)


def check_fp8_simulate(device: torch.device = CPU) -> None:
    x, y = _tensors(device, "fp8_simulate_block64", "x", "y")
    _same_bits(kernels.fp8_simulate(x, 64), y)


def check_fp4_simulate(device: torch.device = CPU) -> None:
    x, y = _tensors(device, "fp4_simulate_block32", "x", "y")
    assert torch.equal(kernels.fp4_simulate(x, 32), y)


def check_hadamard(device: torch.device = CPU) -> None:
    x, y = _tensors(device, "hadamard_128", "x", "y")
    assert torch.equal(kernels.hadamard(x), y)
    assert torch.equal(kernels.hadamard_fp4(x), kernels.fp4_simulate(y))


def check_gemm(name: str, device: torch.device = CPU) -> None:
    """`fp8_gemm_...` or `fp4_gemm_...`: on codes, and on rounded activations as the model does it."""
    a, a_scale, w, w_scale, y = _tensors(device, name, "a", "a_scale", "w", "w_scale", "y")
    rounded = (a.float().unflatten(-1, (-1, 128)) * a_scale.float().unsqueeze(-1)).flatten(-2)
    rounded = rounded.type(kernels.act_round(rounded).dtype)
    if name.startswith("fp8"):
        _near(kernels.fp8_gemm(a, a_scale, w, w_scale), y, "gemm")
        _near(kernels.fp8_linear(rounded, kernels.prepare_fp8((w, w_scale)), torch.bfloat16), y, "gemm")
    else:
        _near(kernels.fp4_gemm(a, a_scale, w, w_scale), y, "gemm")
        _near(kernels.fp4_linear(rounded.float(), w, w_scale).bfloat16(), y, "gemm")


def check_attention(name: str, device: torch.device = CPU) -> None:
    """`sparse_attn_...`: by lists of rows, and by a mask that says the same."""
    q, kv, sink, idxs, o = _tensors(device, name, "q", "kv", "sink", "topk_idxs", "o")
    scale = q.shape[-1] ** -0.5
    _near(kernels.sparse_attention(q[0], kv[0], sink, idxs[0], scale), o[0], "sparse_attn")
    rows = torch.arange(kv.shape[1], device=device)
    mask = (idxs[0].unsqueeze(-1) == rows).any(1)
    _near(kernels.masked_attention(q[0], kv[0].float(), sink, mask, scale), o[0], "sparse_attn")


def check_sinkhorn(device: torch.device = CPU) -> None:
    """All tokens at once, and one by one as in decoding."""
    mixes, scale, base = _tensors(device, "hc_split_sinkhorn", "mixes", "scale", "base")
    expected = _tensors(device, "hc_split_sinkhorn", "pre", "post", "comb")
    for rows in (slice(0, None), *(slice(i, i + 1) for i in range(mixes.shape[1]))):
        got = kernels.hc_split_sinkhorn(mixes[0, rows], scale, base, 4, 20, 1e-6)
        for mine, theirs in zip(got, expected, strict=True):
            worst = float((mine - theirs[0, rows]).abs().max())
            assert worst <= limits("ops")["hc_max_abs_max"], worst


def _tensors(device: torch.device, name: str, *parts: str) -> list[torch.Tensor]:
    return [vectors("ops-golden")[f"{name}.{part}"].to(device) for part in parts]


def _same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert torch.equal(got.view(_bits(got)), expected.view(_bits(expected)))


def _bits(x: torch.Tensor) -> torch.dtype:
    return torch.uint8 if x.element_size() == 1 else torch.int16


def _near(got: torch.Tensor, expected: torch.Tensor, group: str) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    got, expected = got.float(), expected.float()
    difference, rms = got - expected, expected.square().mean().sqrt()
    assert float(difference.norm() / expected.norm()) <= limits("ops")[f"{group}_rel_frobenius_max"]
    assert float(difference.abs().max() / rms) <= limits("ops")[f"{group}_max_abs_over_rms_max"]
