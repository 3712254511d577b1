"""`icebox logits`: its file against recorded vectors, options that must change nothing, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import goldens
from safetensors.torch import load_file

from services.worker import logits
from shared.errors import ExitCode


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(goldens.token_ids()[:41]))
    return path


def _run(tokens: Path, *options: object, checkpoint: Path = goldens.TINY_A, prefill: int = 33) -> int:
    out = tokens.with_name("out.safetensors")
    required = (checkpoint, "--tokens", tokens, "--prefill", prefill, "--out", out)
    return logits.main([str(a) for a in (*required, *options)])


def _output(tokens: Path) -> torch.Tensor:
    tensors = load_file(tokens.with_name("out.safetensors"))
    assert list(tensors) == ["logits"]
    return tensors["logits"]


def test_exact_rows_are_the_recorded_ones(tokens: Path) -> None:
    assert _run(tokens, "--exact", "--chunk", 7) == 0
    expected = goldens.vectors("structure-golden")["prefill33_decode8.logits"]
    assert _output(tokens).dtype == torch.float32
    assert (_output(tokens) - expected).abs().max() < goldens.limits("structure")["logits_max_abs_max"]


def test_quantised_rows_are_the_models(tokens: Path) -> None:
    assert _run(tokens, "--cache-mb", 0) == 0
    assert _output(tokens).equal(goldens.run_case(goldens.shared("quantised"), 33, 8))


def test_prefill_of_everything_gives_one_row(tokens: Path) -> None:
    assert _run(tokens, "--exact", prefill=41) == 0
    assert _output(tokens).shape == (1, 512)


def test_as_a_command(tokens: Path) -> None:
    out = tokens.with_name("out.safetensors")
    command = [sys.executable, "-m", "services.cli", "logits", goldens.TINY_A, "--tokens", tokens, "--prefill", "41"]
    ended = subprocess.run([*command, "--out", out, "--exact"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert _output(tokens).shape == (1, 512)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "at least one token id"),
        ('{"ids": [1]}', "at least one token id"),
        ("[0, 512]", "entry 1 is 512; ids are whole numbers from 0 to 511"),
        ("[0, -1]", "entry 1 is -1"),
        ("[0, 1.0]", "entry 1 is 1.0"),
        ("[true]", "entry 0 is true"),
        ("[0" + ", 0" * 4096 + "]", "4097 ids, but the model takes 4096 at most"),
    ],
    ids=["text", "deep", "empty", "table", "beyond", "negative", "float", "bool", "long"],
)
def test_refuses_token_files(tokens: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokens.write_text(content)
    assert _run(tokens) == ExitCode.USAGE
    _one_line(capsys, str(tokens), said)


@pytest.mark.parametrize(
    ("options", "prefill", "said"),
    [
        ((), 0, "--prefill must be from 1 to 41"),
        ((), 42, "--prefill must be from 1 to 41"),
        (("--chunk", -1), 33, "--chunk"),
        (("--cache-mb", -1), 33, "--cache-mb"),
    ],
)
def test_refuses_numbers(
    tokens: Path, options: tuple[object, ...], prefill: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tokens, *options, prefill=prefill) == ExitCode.USAGE
    _one_line(capsys, said)


@pytest.mark.parametrize(("out", "said"), [("none/x.safetensors", "does not exist"), (".", "is a directory")])
def test_refuses_places_before_it_computes(
    tokens: Path, out: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "Model", None)
    assert _run(tokens, "--out", tokens.parent / out) == ExitCode.USAGE
    _one_line(capsys, said)


def test_a_failed_write_leaves_nothing(
    tokens: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert _run(tokens, "--exact", prefill=41) == ExitCode.FAILED
    _one_line(capsys, "cannot write (No space left on device)")
    assert [p.name for p in tokens.parent.iterdir()] == ["ids.json"]


def test_names_a_missing_token_file(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens.unlink()
    assert _run(tokens) == ExitCode.USAGE
    _one_line(capsys, "ids.json: cannot read", "No such file")


def test_names_a_missing_checkpoint(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tokens, checkpoint=tokens.with_name("nowhere")) == ExitCode.CONFIG
    _one_line(capsys, "nowhere")


def test_names_a_truncated_shard(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = _damaged(tokens) / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert _run(tokens, checkpoint=shard.parent) == ExitCode.CONFIG
    _one_line(capsys, shard.name)


def test_names_a_tensor_of_another_shape(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _damaged(tokens) / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 512', '"vocab_size": 640'))
    assert _run(tokens, checkpoint=config.parent) == ExitCode.CONFIG
    _one_line(capsys, "embed.weight")


def _damaged(tokens: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(goldens.TINY_A, tokens.with_name("checkpoint")))


def _one_line(capsys: pytest.CaptureFixture[str], *said: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("icebox logits: ")
    assert captured.err.count("\n") == 1
    for text in said:
        assert text in captured.err
