"""`icebox synth`: what it prints, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import icebox, icebox_json

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.verify import verify


def test_writes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, row = icebox_json(
        capsys, "synth", out, "--width", "tiny", "--layers", 3, "--experts", 5, "--seed", 9, "--skew", 1.5
    )
    assert (code, row["path"], row["shards"]) == (0, str(out), 6)
    assert verify(out, full=True).problems == ()
    config = ModelConfig.from_dir(out)
    assert (config.num_hidden_layers, config.n_routed_experts) == (3, 5)


def test_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = icebox(capsys, "synth", tmp_path / "out", "--width", "tiny", "--layers", 1, "--experts", 4)
    assert code == 0
    assert "tensors in 4 shards" in out


def test_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = icebox(capsys, "synth", tmp_path / "out", "--width", "wide")
    assert (code, out) == (78, "")
    assert err == "icebox: --width wide: unknown; one of full, small, tiny\n"
    (tmp_path / "mine").touch()
    code, _, err = icebox(capsys, "synth", tmp_path)
    assert code == 78
    assert "not an empty directory" in err
