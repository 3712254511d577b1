from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runtime import write_config

from shared.config import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of an instance of the test's own."""
    return write_config(tmp_path)
