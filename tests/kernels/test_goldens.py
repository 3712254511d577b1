"""Operations against vectors recorded from the vendor's GPU kernels."""

from __future__ import annotations

import pytest
from helpers import op_goldens


def test_act_quant() -> None:
    op_goldens.check_act_quant()


def test_fp8_simulate() -> None:
    op_goldens.check_fp8_simulate()


def test_fp4_simulate() -> None:
    op_goldens.check_fp4_simulate()


def test_hadamard() -> None:
    op_goldens.check_hadamard()


@pytest.mark.parametrize("name", op_goldens.names("fp8_gemm") + op_goldens.names("fp4_gemm"))
def test_gemm(name: str) -> None:
    op_goldens.check_gemm(name)


@pytest.mark.parametrize("name", op_goldens.names("sparse_attn"))
def test_attention(name: str) -> None:
    op_goldens.check_attention(name)


def test_sinkhorn() -> None:
    op_goldens.check_sinkhorn()
