"""`icebox eval demo`: what cannot be done is told before anything is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import icebox as icebox_here
from helpers.fake_worker import make_checkpoint
from helpers.icebox import icebox
from helpers.services import write_config


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--share", "nan"], 2, "nan is not above 0 and at most 1"),
        (["--share", "0"], 2, "0 is not above 0 and at most 1"),
        (["--share", "1.5"], 2, "1.5 is not above 0 and at most 1"),
        (["--share", "half"], 2, "invalid share value: 'half'"),
        (["--out", "/nowhere/x.json"], 78, "icebox: /nowhere/x.json: cannot be written"),
        (["--config", "/nowhere/c.toml"], 78, "icebox: /nowhere/c.toml: cannot read this config file"),
        ([], 69, "icebox: the front does not answer in"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], code: int, complaint: str) -> None:
    config = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))
    run = icebox("eval", "demo", "--config", str(config), *arguments)
    assert (run.returncode, run.stdout) == (code, ""), run.stderr
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    run = icebox("eval", "demo", config=write_config(tmp_path / "c.toml", tmp_path))
    assert (run.returncode, "cannot read the tokenizer" in run.stderr) == (78, True), run.stderr


def test_outside_a_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = icebox_here(capsys, "eval", "demo")
    complaint = "demo/evaluate_services.py: no such file; run `icebox eval` from a source checkout"
    assert (code, err) == (78, f"icebox: {complaint}\n")
