"""`icebox pack`: what it prints, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.checkpoints import copy_of_tiny, tiny_checkpoint
from helpers.commands import icebox, icebox_json

from shared.checkpoint.verify import verify


def test_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, row = icebox_json(capsys, "pack", tiny_checkpoint(), out)
    assert (code, row["files"], row["freed_bytes"]) == (0, 7, 0)
    assert verify(out, full=True).problems == ()
    code, text, _ = icebox(capsys, "pack", tiny_checkpoint(), out)
    assert code == 0
    assert "in 7 files" in text


def test_deletes_the_source_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_of_tiny(tmp_path)
    code, text, _ = icebox(capsys, "pack", source, tmp_path / "out", "--delete-source")
    assert code == 0
    assert "of the source deleted" in text
    assert list(source.glob("*.safetensors")) == []


def test_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    code, out, err = icebox(capsys, "pack", tiny_checkpoint(), tmp_path)
    assert (code, out) == (78, "")
    assert err == f"icebox: {tmp_path}: exists and is not a pack; choose another name or delete it\n"
