"""Verification finds every fault, says which file it is in, and says nothing about a whole checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import copy_of_tiny, tiny_checkpoint
from helpers.safetensors_bytes import rewrite_header

from shared.checkpoint import verify_data
from shared.checkpoint.index import INDEX_NAME, TensorIndex
from shared.checkpoint.pack import pack
from shared.checkpoint.verify import VerifyReport, verify
from shared.errors import CheckpointError

SHARD = "model-00004-of-00008.safetensors"  # layer 2


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return copy_of_tiny(tmp_path)


def said(report: VerifyReport) -> str:
    return "\n".join(f"{problem.file}: {problem.text}" for problem in report.problems)


def poke(directory: Path, tensor: str, value: bytes, at: int = 0) -> None:
    """Overwrite bytes of a tensor on disk."""
    info = TensorIndex.open(directory)[tensor]
    with info.file.open("r+b") as file:
        file.seek(info.offset + at)
        file.write(value)


@pytest.mark.parametrize("full", [False, True])
def test_a_whole_checkpoint(full: bool) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(tiny_checkpoint(), full, lambda done, total: seen.append((done, total)))
    assert report.problems == ()
    assert (report.files, report.tensors) == (8, len(TensorIndex.open(tiny_checkpoint()).tensors))
    assert seen == [] if not full else seen[-1] == (report.nbytes, report.nbytes)


def test_missing_truncated_and_grown_shards_are_all_listed(directory: Path) -> None:
    (directory / SHARD).unlink()
    with (directory / "model-00005-of-00008.safetensors").open("r+b") as file:
        file.truncate(5000)
    with (directory / "model-00006-of-00008.safetensors").open("ab") as file:
        file.write(b"more")
    report = verify(directory)
    assert report.download_again == [SHARD, "model-00005-of-00008.safetensors", "model-00006-of-00008.safetensors"]
    assert "missing" in said(report)
    assert "4 bytes follow" in said(report)


def test_a_lfs_pointer_is_named(directory: Path) -> None:
    (directory / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert said(verify(directory)) == f"{SHARD}: is a Git LFS pointer, not the file; `git lfs pull` fetches it"


def test_tensors_that_are_not_what_the_model_needs(directory: Path) -> None:
    def change(table: dict[str, dict[str, object]]) -> None:
        table["layers.2.attn_norm.weight"]["dtype"] = "F16"
        table["layers.2.attn.wkv.weight"]["shape"] = [64, 256]
        table["layers.2.ffn_norm.other"] = table.pop("layers.2.ffn_norm.weight")

    rewrite_header(directory / SHARD, change)
    text = said(verify(directory))
    assert f"{SHARD}: tensor layers.2.attn_norm.weight is F16 [128], expected BF16 [128]" in text
    assert f"{SHARD}: tensor layers.2.attn.wkv.weight is F8_E4M3 [64, 256], expected F8_E4M3 [128, 128]" in text
    assert f"{SHARD}: tensor layers.2.ffn_norm.weight, which the index puts here, is missing" in text


def test_a_tensor_in_two_files_or_in_none(directory: Path) -> None:
    shutil.copy(directory / SHARD, directory / "copy.safetensors")
    index = json.loads((directory / INDEX_NAME).read_text())
    index["weight_map"]["layers.2.attn_norm.weight"] = "copy.safetensors"
    del index["weight_map"]["layers.3.attn_norm.weight"]
    (directory / INDEX_NAME).write_text(json.dumps(index))
    rewrite_header(
        directory / "model-00005-of-00008.safetensors",
        lambda table: table.update({"x": table.pop("layers.3.attn_norm.weight")}),
    )
    text = said(verify(directory))
    assert "tensor layers.2.attn_norm.weight is in" in text
    assert f"{INDEX_NAME}: tensor layers.3.attn_norm.weight of the model is in no file" in text


def test_extra_tensors_are_allowed(directory: Path) -> None:
    rewrite_header(directory / SHARD, lambda table: table.update(extra={**table["layers.2.attn_norm.weight"]}))
    # The same bytes under two names would overlap, so the extra tensor is an empty one.
    rewrite_header(
        directory / SHARD,
        lambda table: table["extra"].update(shape=[0], data_offsets=[table["extra"]["data_offsets"][1]] * 2),
    )
    assert verify(directory).problems == ()


@pytest.mark.parametrize(
    ("tensor", "at", "value", "message"),
    [
        ("layers.2.attn.wkv.weight", 77, b"\x7f\xff\x7f", "holds 3 NaN values"),
        ("layers.2.ffn.experts.3.w2.scale", 5, b"\xff", "holds 1 impossible scales (byte 255)"),
        ("embed.weight", 2 * 9, b"\x80\x7f\x80\xff", "holds 2 NaN or infinite values"),
        ("layers.2.hc_attn_fn", 4, b"\x00\x00\xc0\x7f", "holds 1 NaN or infinite values"),
        ("layers.1.ffn.gate.tid2eid", 8, b"\x06" + bytes(7), "holds 1 expert ids outside 0 to 5"),
        ("layers.1.ffn.gate.tid2eid", 0, b"\xff" * 8, "holds 1 expert ids outside 0 to 5"),
    ],
)
def test_impossible_values(directory: Path, tensor: str, at: int, value: bytes, message: str) -> None:
    poke(directory, tensor, value, at)
    assert verify(directory).problems == ()
    report = verify(directory, full=True)
    assert [problem.text for problem in report.problems] == [f"tensor {tensor} {message}"]
    assert report.download_again == [TensorIndex.open(directory)[tensor].file.name]


def sha256_beside(directory: Path, digest: str) -> None:
    (directory / f"{SHARD}.sha256").write_text(f"{digest}  {SHARD}\n")


def sha256_in_the_hubs_notes(directory: Path, digest: str) -> None:
    notes = directory / ".cache" / "huggingface" / "download" / f"{SHARD}.metadata"
    notes.parent.mkdir(parents=True)
    notes.write_text(f"60d8d707\n{digest}\n1777000000.0\n")


def sha256_in_the_links_name(directory: Path, digest: str) -> None:
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    (directory / SHARD).rename(blobs / digest)
    (directory / SHARD).symlink_to(blobs / digest)


@pytest.mark.parametrize("publish", [sha256_beside, sha256_in_the_hubs_notes, sha256_in_the_links_name])
def test_published_checksums_find_a_flipped_bit(directory: Path, publish: object) -> None:
    digest = hashlib.sha256((directory / SHARD).read_bytes()).hexdigest()
    publish(directory, digest)  # type: ignore[operator]
    assert (verify(directory, full=True).problems, verify(directory, full=True).checksums) == ((), 1)
    poke(directory, "layers.2.ffn.experts.3.w2.weight", b"\x55\x66\x77", at=500)
    report = verify(directory, full=True)
    assert report.download_again == [SHARD]
    assert f"should be {digest}" in said(report)


def test_a_packs_manifest_finds_a_flipped_bit_and_names_the_record(tmp_path: Path) -> None:
    out = tmp_path / "pack"
    pack(tiny_checkpoint(), out)
    assert verify(out, full=True).checksums > 40
    poke(out, "layers.2.ffn.experts.3.w2.weight", b"\x55\x66\x77", at=500)
    assert "layers.2.safetensors: layers.2.ffn.experts.3: crc32 is" in said(verify(out, full=True))


@pytest.mark.parametrize("late", [False, True])
def test_a_file_that_vanishes_meanwhile_is_named_and_the_rest_is_told(directory: Path, late: bool) -> None:
    poke(directory, "embed.weight", b"\x80\x7f")

    def progress(done: int, total: int) -> None:
        if done == total or not late:
            (directory / SHARD).unlink(missing_ok=True)

    report = verify(directory, True, progress)
    assert f"{SHARD}: vanished while it was read" in said(report)
    assert "embed.weight holds 1 NaN or infinite values" in said(report)


def test_ctrl_c_ends_reading_within_the_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_data, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(verify_data, "MOST_FILES_AT_ONCE", 2)
    main, seen = threading.get_ident(), list[int]()

    def progress(done: int, total: int) -> None:
        if not seen:
            signal.pthread_kill(main, signal.SIGINT)
        seen.append(done)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        verify(directory, True, progress)
    assert seen[-1] < 400_000


@pytest.mark.parametrize("size", [100, 5000])
def test_a_shard_that_may_not_be_read_is_named(directory: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(directory / SHARD, size)
    open_file = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == SHARD:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert re.fullmatch(rf"{SHARD}: cannot (be )?read \(Permission denied\)", said(verify(directory)))


def test_other_models_are_refused_by_name(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v41"}))
    with pytest.raises(CheckpointError, match=r"deepseek_v41 \(V4.1\).*supported: deepseek_v4"):
        verify(directory)
