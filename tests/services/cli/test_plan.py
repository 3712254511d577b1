"""`icebox plan` and `icebox doctor`: the table a person sees, the verdict, and the exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.checkpoints import tiny_checkpoint
from helpers.commands import icebox, icebox_json

from services.cli.plan import two_digits
from shared.checkpoint.synth_shapes import published_config
from shared.planning.checks import Level, examine
from shared.planning.machine import load_machine

CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = Path("/models/v4")
SPARK = CONFIGS / "machines" / "spark.toml"


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    """configs/spark.toml with a model directory that has a configuration and no weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(published_config("full")))
    text = (CONFIGS / "spark.toml").read_text().replace("/models/DeepSeek-V4-Flash", str(tmp_path / "model"))
    (tmp_path / "spark.toml").write_text(text)
    return tmp_path / "spark.toml"


def test_the_plan_of_a_described_machine(spark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = icebox(capsys, "plan", spark, "--machine", SPARK)
    assert code == 0
    assert "NVIDIA DGX Spark: unified memory" in out
    assert "Dense weights and state of the backbone: 9.77 GB" in out
    assert "Cache: 90.00 GB = 6,731 slots of 13,369,344 bytes, 60% of 11,264 experts" in out
    assert "7.86 GB dense + 258 x 13.37 MB experts = 11.31 GB at 249.00 GB/s: 45.4 ms" in out
    assert "Fits" in out


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_names_are_shown_as_they_are(
    spark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = SPARK.read_text().replace("NVIDIA DGX Spark", "rack [/3]").replace("NVIDIA GB10", "GB10 [lab]")
    (tmp_path / "machine.toml").write_text(text)
    code, out, _ = icebox(capsys, command, spark, "--machine", tmp_path / "machine.toml")
    assert (code, "rack [/3]" in out) == (0, True)
    assert command == "plan" or "GB10 [lab]" in out


def test_a_plan_that_does_not_fit_names_the_number_that_does(spark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spark.write_text(spark.read_text().replace('"90 GB"', '"110 GB"'))
    code, row = icebox_json(capsys, "plan", spark, "--machine", SPARK)
    assert (code, row["plan"]["fits"]) == (78, False)
    code, out, _ = icebox(capsys, "plan", spark, "--machine", SPARK)
    assert code == 78
    assert "Does not fit: cache.bytes = 110.00 GB does not fit; at most 93." in out


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\nname = "t"\n[model]\npath = "{tiny_checkpoint()}"\n')
    code, row = icebox_json(capsys, "plan", path)
    assert (code, row["plan"]["cached"]) == (0, 1.0)
    assert row["machine"]["disk_speed"] > 0
    code, out, _ = icebox(capsys, "doctor", path)
    assert code == 0
    for subject in ("memory:", "swap:", "disk:", "free space:", "GPU", "Fits"):
        assert subject in out


def test_doctor_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    code, row = icebox_json(capsys, "doctor", "--path", tiny_checkpoint())
    assert code == 0
    assert {finding["subject"] for finding in row["findings"]} >= {"memory", "swap", "disk", "GPU"}
    assert "plan" not in row


def test_what_the_doctor_finds() -> None:
    good = load_machine(SPARK)
    assert {finding.level for finding in examine(good, MODEL)} == {Level.OK}
    assert good.gpu is not None
    bad = replace(
        good,
        memory_available=10**9,
        swap_total=10**9,
        swap_used=10**8,
        disk_speed=5e8,
        memlock=65536,
        gpu=replace(good.gpu, held_by=(42,)),
    )
    warnings = {f.subject: f.text for f in examine(bad, MODEL) if f.level is Level.WARN}
    assert set(warnings) == {"memory", "swap", "disk", "GPU", "memlock"}
    assert "process 42" in warnings["GPU"]
    assert "swapoff" in warnings["swap"]
    assert "27 ms" in warnings["disk"]
    buffered = {f.subject: f.text for f in examine(replace(good, disk_direct=False), MODEL) if f.level is Level.WARN}
    assert "refuses O_DIRECT" in buffered["disk"]
    unmeasured = {f.subject: f.text for f in examine(replace(good, disk_speed=0.0), MODEL) if f.level is Level.WARN}
    assert "no safetensors file to read in /models/v4; name a config or --path" in unmeasured["disk"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.5312, "0.53"), (11.34, "11"), (313.7, "310"), (12345.6, "12,000"), (0.0, "0")]
)
def test_an_estimate_has_two_digits(value: float, text: str) -> None:
    assert two_digits(value) == text
