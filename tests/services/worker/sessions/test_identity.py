"""States kept on a disk are found by the worker that would compute the same bits, and by no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers.goldens import TINY_A

from services.worker.sessions import identity, session_root
from shared.checkpoint.index import TensorIndex


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for path in TINY_A.glob("model*"):
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "config.json").write_bytes((TINY_A / "config.json").read_bytes())
    return directory


def root(checkpoint: Path, device: str = "cpu") -> bytes:
    return session_root(TensorIndex.open(checkpoint), device)


def test_nothing_changed(checkpoint: Path) -> None:
    assert root(checkpoint) == root(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_another_file(checkpoint: Path, name: str) -> None:
    before = root(checkpoint)
    os.utime(checkpoint / name, ns=(0, 0))
    assert root(checkpoint) != before


@pytest.mark.parametrize("name", ["module.py", "kernel.cuh"])
def test_other_code(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    code = tmp_path / "code"
    (code / "part").mkdir(parents=True)
    (code / "part" / name).write_text("x = 1;\n")
    monkeypatch.setattr(identity, "_CODE", (code,))
    before = root(checkpoint)
    (code / "part" / name).write_text("x = 2;\n")
    assert root(checkpoint) != before


def test_other_compiler_of_kernels(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    before = root(checkpoint, "cuda:0")
    assert root(checkpoint, "cuda:0") == before
    monkeypatch.setattr(identity, "version", {"tilelang": "77.0"}.__getitem__)
    assert root(checkpoint, "cuda:0") != before


def test_other_threads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = root(checkpoint)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert root(checkpoint) != before
