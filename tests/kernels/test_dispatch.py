"""One name for an operation on every device."""

from __future__ import annotations

import importlib.util

import pytest

import kernels
from kernels import reference


@pytest.mark.parametrize("package", [kernels, reference])
def test_no_module_has_the_name_of_an_operation(package: object) -> None:
    """Importing such a module would put it in the operation's place."""
    name = package.__name__
    assert [op for op in kernels.__all__ if importlib.util.find_spec(f"{name}.{op}")] == []


def test_an_operation_keeps_its_twins_name() -> None:
    for op in kernels.__all__:
        assert getattr(kernels, op).__name__ == op
