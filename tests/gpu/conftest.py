"""Everything in this folder needs an NVIDIA GPU, and is skipped without."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.gpu import why_no_gpu

from shared.cuda.device import Device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> Device:
    return Device.named("cuda")
