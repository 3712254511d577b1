"""`icebox verify`: exit codes, the list of faults, and what to download again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.checkpoints import copy_of_tiny, tiny_checkpoint
from helpers.commands import icebox, icebox_json


def test_all_well(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = icebox(capsys, "verify", tiny_checkpoint())
    assert code == 0
    assert "all well\nHeaders only; --full reads the data too" in out
    code, out, _ = icebox(capsys, "verify", tiny_checkpoint(), "--full")
    assert code == 0
    assert "no checksums there to compare" in out


def test_faults_are_listed_with_what_to_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copy_of_tiny(tmp_path)
    (directory / "model-00002-of-00008.safetensors").unlink()
    (directory / "model-00007-of-00008.safetensors").write_bytes(b"")
    code, out, _ = icebox(capsys, "verify", directory)
    assert code == 1
    assert out.splitlines() == [
        "model-00002-of-00008.safetensors: missing; download it again",
        "model-00007-of-00008.safetensors: 0 bytes are too few for a safetensors file; download it again",
        "Download again: model-00002-of-00008.safetensors model-00007-of-00008.safetensors",
    ]
    code, row = icebox_json(capsys, "verify", directory, "--full")
    assert (code, row["ok"], len(row["download_again"])) == (1, False, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41"}, "deepseek_v41 (V4.1), another architecture"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported; supported: deepseek_v4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "names 'awq'"),
        ({"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64}}, "MLX"),
        ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8'; only fp4 experts are supported"),
    ],
)
def test_other_models_and_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], message: str
) -> None:
    config = json.loads((tiny_checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    code, out, err = icebox(capsys, "verify", tmp_path)
    assert (code, out) == (78, "")
    assert message in err


def test_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "DeepSeek-V4-Flash-Q4_K_M.gguf").touch()
    code, _, err = icebox(capsys, "verify", tmp_path)
    assert code == 78
    assert "DeepSeek-V4-Flash-Q4_K_M.gguf: GGUF is not supported" in err


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = icebox(capsys, "verify", tmp_path / "none")
    assert code == 78
    assert "no such model directory" in err
    code, _, err = icebox(capsys, "verify", tmp_path)
    assert code == 78
    assert "config.json: cannot read" in err
