"""Everything in this folder needs an NVIDIA GPU, and is skipped without.

What has no large number among its parameters is `small`: quick even where every memory access is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.gpu import why_no_gpu

from shared.cuda.device import Device

LARGEST = 256
"""Number among the parameters of a small test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if isinstance(item, pytest.Function) and _is_small(item):
                item.add_marker(pytest.mark.small)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _is_small(item: pytest.Function) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return all(number <= LARGEST for parameter in parameters for number in _numbers(parameter))


def _numbers(parameter: object) -> Iterator[int]:
    if isinstance(parameter, int):
        yield parameter
    elif isinstance(parameter, tuple | list):
        for part in parameter:
            yield from _numbers(part)


@pytest.fixture
def device() -> Device:
    return Device.named("cuda")
