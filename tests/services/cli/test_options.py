"""Options that several commands share."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import typer

from services.cli.options import check_output, finite
from shared.errors import ConfigError


def test_outputs_that_can_be_written_are_left_as_they_are(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("kept")
    for path in (there, tmp_path / "new.json"):
        check_output(path)
    assert there.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "Is a directory"), ("none/x", "No such file"), ("x" * 300, "File name too long"), ("file/x", "Not a dir")],
)
def test_outputs_that_cannot(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"cannot be written \({reason}.*\); name another file"):
        check_output(tmp_path / name)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite(value: float) -> None:
    assert finite(1.5) == 1.5
    assert finite(None) is None
    with pytest.raises(typer.BadParameter, match="is not a finite number"):
        finite(value)
