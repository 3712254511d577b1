"""Random operands for the matrix kernels, on the GPU, and how close results must come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kernels.reference import act_quant

CUDA = torch.device("cuda")


def normal(seed: int, *shape: int) -> torch.Tensor:
    """float32, the same on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def activations(seed: int, *shape: int) -> torch.Tensor:
    """bfloat16 as `act_round` leaves it, columns of very different size."""
    x = normal(seed, *shape) * torch.logspace(-2, 2, shape[-1], device=CUDA)
    return rounded(x.bfloat16())


def rounded(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 [..., k]: quantised to e4m3 and back."""
    q, scale = act_quant(x)
    return (q.float().unflatten(-1, (-1, 128)) * scale.float().unsqueeze(-1)).flatten(-2).bfloat16()


def fp8_weight(seed: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes float8_e4m3fn [n, k] and scales float8_e8m0fnu [ceil(n / 128), k / 128]."""
    codes = (normal(seed, n, k) * 40).type(torch.float8_e4m3fn)
    return codes, _scales(seed, -(-n // 128), k // 128)


def fp4_weight(seed: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [n, k / 2] and scales float8_e8m0fnu [n, k / 32]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (n, k // 2), generator=generator, dtype=torch.uint8).to(CUDA)
    return codes, _scales(seed, n, k // 32)


def record(seed: int, hidden: int, width: int) -> torch.Tensor:
    """An expert's six tensors, uint8, one behind the other."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    parts = [part for i, shape in enumerate(shapes) for part in fp4_weight(seed + i, *shape)]
    return torch.cat([part.view(torch.uint8).flatten() for part in parts])


def near(got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Relative Frobenius error; a NaN never passes."""
    assert got.shape == expected.shape
    error = float((got.double() - expected).norm() / expected.norm().clamp_min(1e-300)) if got.numel() else 0.0
    assert error <= limit, f"relative error {error:.2e}, limit {limit:.0e}"


def twice(operation: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of an operation whose outputs are poisoned, and which gives the same bits again."""
    with _poison():
        first, second = operation(), operation()
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    return first


@contextmanager
def _poison() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _scales(seed: int, *shape: int) -> torch.Tensor:
    exponents = torch.randint(112, 120, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return exponents.to(CUDA).view(torch.float8_e8m0fnu)
