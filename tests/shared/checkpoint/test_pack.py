"""Packing: same tensors, aligned records, right checksums; resumable after a kill and a full disk."""

from __future__ import annotations

import errno
import filecmp
import json
import mmap
import os
import random
import shutil
import signal
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.checkpoints import copy_of_tiny, tensor_bytes, tiny_checkpoint
from helpers.packing import JOURNAL_BYTES, assert_same_tree, killer, run_and_die
from helpers.safetensors_bytes import rewrite_header
from helpers.unreachable import UNREACHABLE, unreachable
from safetensors import safe_open

from shared.checkpoint import pack_source, stream_writer
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.manifest import record_checksums
from shared.checkpoint.pack import pack
from shared.checkpoint.records import ExpertRecords
from shared.checkpoint.verify import verify
from shared.errors import CapacityError, CheckpointError, LockedError


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "out"
    pack(tiny_checkpoint(), out)
    return out


def test_every_tensor_is_the_same(packed: Path) -> None:
    source, result = TensorIndex.open(tiny_checkpoint()), TensorIndex.open(packed)
    assert set(source.tensors) <= set(result.tensors)
    assert {name.split(".")[0] for name in set(result.tensors) - set(source.tensors)} == {"padding"}
    for name in source.tensors:
        assert tensor_bytes(source, name) == tensor_bytes(result, name), name


def test_each_record_is_one_aligned_read_in_slot_order_with_its_checksum(packed: Path) -> None:
    config = ModelConfig.from_dir(packed)
    ours, theirs = (ExpertRecords(TensorIndex.open(path), config) for path in (packed, tiny_checkpoint()))
    size = ours.layout.record_bytes
    checksums = record_checksums(packed)
    assert len(checksums) == config.num_moe_layers * config.n_routed_experts
    for layer in range(config.num_moe_layers):
        for expert in range(config.n_routed_experts):
            plan = ours.plan(layer, expert)
            (extent,) = plan.extents
            assert (extent.offset % 4096, extent.nbytes, extent.pieces) == (0, size, ((0, 0, size),))
            record, original = bytearray(size), bytearray(size)
            ours.read_record(layer, expert, memoryview(record))
            theirs.read_record(layer, expert, memoryview(original))
            assert record == original
            assert checksums[plan.name] == zlib.crc32(record)


def test_the_library_reads_it_and_the_small_files_come_along(packed: Path) -> None:
    assert verify(packed, full=True).problems == ()
    with safe_open(packed / "layers.2.safetensors", framework="np") as file:
        assert file.get_tensor("layers.2.ffn.experts.5.w1.weight").shape == (128, 64)
    for name in ("config.json", "inference/config.json", "tokenizer.json"):
        assert filecmp.cmp(packed / name, tiny_checkpoint() / name, shallow=False)
    assert not (packed / ".pack").exists()


def test_killed_at_fifty_points_it_ends_byte_identical(tmp_path: Path, packed: Path) -> None:
    rng, out = random.Random(7), tmp_path / "out"
    total = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    started = time.monotonic()
    pack(tiny_checkpoint(), tmp_path / "timed", journal_bytes=JOURNAL_BYTES)
    whole_s, kills = time.monotonic() - started, 0
    while kills < 50:
        if rng.random() < 0.5:
            at = rng.randrange(total)
            killed = run_and_die(lambda at=at: pack(tiny_checkpoint(), out, False, killer(at), JOURNAL_BYTES))
        else:
            killed = run_and_die(
                lambda: pack(tiny_checkpoint(), out, journal_bytes=JOURNAL_BYTES), rng.random() * whole_s
            )
        kills += killed
        if kills % 5 == 0 or not killed:
            pack(tiny_checkpoint(), out, journal_bytes=JOURNAL_BYTES)
            assert_same_tree(out, packed)
            shutil.rmtree(out)


def test_a_kill_costs_no_more_than_the_journals_step(tmp_path: Path) -> None:
    out, seen = tmp_path / "out", []
    assert run_and_die(lambda: pack(tiny_checkpoint(), out, False, killer(150_000), JOURNAL_BYTES))
    pack(tiny_checkpoint(), out, False, lambda done, total: seen.append(done), JOURNAL_BYTES)
    assert seen[0] >= 80_000


@pytest.mark.parametrize("size", [None, 0, 5000, 50_000])
def test_a_partial_file_that_is_shorter_than_its_journal_is_begun_anew(
    tmp_path: Path, packed: Path, size: int | None
) -> None:
    out = tmp_path / "out"
    assert run_and_die(lambda: pack(tiny_checkpoint(), out, False, killer(150_000), JOURNAL_BYTES))
    (partial,) = out.glob("*.partial")
    partial.unlink() if size is None else os.truncate(partial, size)
    pack(tiny_checkpoint(), out, journal_bytes=JOURNAL_BYTES)
    assert_same_tree(out, packed)


@pytest.mark.parametrize("size", [None, 0, 5000])
def test_a_file_that_was_complete_and_is_lost_is_written_anew(tmp_path: Path, packed: Path, size: int | None) -> None:
    out = tmp_path / "out"
    assert run_and_die(lambda: pack(tiny_checkpoint(), out, False, killer(900_000), JOURNAL_BYTES))
    lost = out / "layers.0.safetensors"
    lost.unlink() if size is None else os.truncate(lost, size)
    assert run_and_die(lambda: pack(tiny_checkpoint(), out, False, killer(150_000), JOURNAL_BYTES))
    pack(tiny_checkpoint(), out, journal_bytes=JOURNAL_BYTES)
    assert_same_tree(out, packed)


def test_a_file_that_is_lost_with_its_source_is_named(tmp_path: Path) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    assert run_and_die(lambda: pack(source, out, True, killer(900_000), JOURNAL_BYTES))
    (out / "layers.0.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model-\S+: missing, and layers.0.safetensors is made of it"):
            pack(source, out, True)


@pytest.mark.parametrize("delete_source", [False, True])
@pytest.mark.parametrize("size", [None, 5000])
def test_a_finished_pack_that_lost_a_file_says_so(tmp_path: Path, size: int | None, delete_source: bool) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    pack(source, out)
    lost = out / "layers.0.safetensors"
    lost.unlink() if size is None else os.truncate(lost, size)
    with pytest.raises(CheckpointError, match=r"layers.0.safetensors: missing or truncated; pack the checkpoint anew"):
        pack(source, out, delete_source)
    assert len(list(source.glob("*.safetensors"))) == 8


def test_killed_while_deleting_the_source_nothing_is_lost(tmp_path: Path, packed: Path) -> None:
    rng = random.Random(11)
    total = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    for _ in range(8):
        at = rng.randrange(total)
        run_and_die(lambda at=at: pack(source, out, True, killer(at), JOURNAL_BYTES))
    report = pack(source, out, delete_source=True, journal_bytes=JOURNAL_BYTES)
    assert_same_tree(out, packed)
    assert list(source.glob("*.safetensors")) == []
    assert (source / "config.json").exists()
    assert report.nbytes == total
    assert pack(source, out, delete_source=True).freed == 0


def test_killed_while_deleting_the_source_of_a_finished_pack_it_goes_on(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    pack(source, out)
    with monkeypatch.context() as patch:
        patch.setattr(pack_source, "sync_directory", lambda path: os.kill(os.getpid(), signal.SIGKILL))
        assert run_and_die(lambda: pack(source, out, delete_source=True))
    assert len(list(source.glob("*.safetensors"))) == 7
    pack(source, out, delete_source=True)
    assert list(source.glob("*.safetensors")) == []
    assert_same_tree(out, packed)


def test_shards_go_one_by_one_and_only_when_their_content_is_safe(tmp_path: Path) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    left: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        left.append((len(list(out.glob("*.safetensors"))), len(list(source.glob("*.safetensors")))))

    report = pack(source, out, delete_source=True, progress=progress)
    assert {(files, shards) for files, shards in left} == {(i, 8 - i) for i in range(7)}
    assert report.freed == sum(path.stat().st_size for path in tiny_checkpoint().glob("*.safetensors"))


def test_a_pack_that_reads_back_wrong_keeps_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    write = os.write
    monkeypatch.setattr(stream_writer.os, "write", lambda fd, data: write(fd, mmap.mmap(-1, len(data))))
    with pytest.raises(CheckpointError, match=r"layers.0.safetensors: .*nothing of its source was deleted"):
        pack(source, out, delete_source=True)
    assert len(list(source.glob("*.safetensors"))) == 8


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("at", [0, 8, 4096])
def test_a_pack_that_was_damaged_meanwhile_keeps_the_source(tmp_path: Path, at: int, finished: bool) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    run_and_die(lambda: pack(source, out, False, killer(10**9 if finished else 900_000), JOURNAL_BYTES))
    with (out / "layers.0.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"damaged")
    with pytest.raises(CheckpointError, match=r"layers.0.safetensors: .*nothing of its source was deleted"):
        pack(source, out, delete_source=True)
    assert len(list(source.glob("*.safetensors"))) == 8


def test_a_full_disk_is_said_and_can_be_gone_on_from(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, left, write = tmp_path / "out", 1_500_000, os.write

    def small_disk(fd: int, data: memoryview) -> int:
        nonlocal left
        fits = len(data) if len(data) <= left else left // 4096 * 4096
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= fits
        return write(fd, data[:fits])

    with monkeypatch.context() as patch:
        patch.setattr(stream_writer.os, "write", small_disk)
        with pytest.raises(CheckpointError, match=r"layers.\d.safetensors.partial: no space left; free some and give"):
            pack(tiny_checkpoint(), out, journal_bytes=JOURNAL_BYTES)
    seen: list[int] = []
    pack(tiny_checkpoint(), out, False, lambda done, total: seen.append(done), JOURNAL_BYTES)
    assert seen[0] > 400_000
    assert_same_tree(out, packed)


@pytest.mark.parametrize("call", ["sendfile", "fsync", "fdatasync"])
def test_a_full_disk_is_named_by_what_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match=r"/out/\S+: no space left"):
        pack(tiny_checkpoint(), tmp_path / "out")


def test_what_is_no_regular_file_stays_behind(tmp_path: Path) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    os.mkfifo(source / "pipe")
    (source / "nowhere").symlink_to("nothing")
    (source / "LICENSE").symlink_to(tmp_path / "text")
    (tmp_path / "text").write_text("terms")
    pack(source, out)
    assert (out / "LICENSE").read_text() == "terms"
    assert not {path.name for path in out.iterdir()} & {"pipe", "nowhere"}


def test_small_files_need_space_too(tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    needed = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    (source / "training.log").write_bytes(bytes(200_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed + 199_999))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ bytes more"):
        pack(source, out)


def test_too_little_space_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    layer = max(path.stat().st_size for path in source.glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * layer))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ bytes more, .* --delete-source needs room for little"):
        pack(source, out)
    assert list(out.glob("*.safetensors*")) == []
    pack(source, out, delete_source=True)
    assert verify(out, full=True).problems == ()


@pytest.mark.parametrize("change", ["replaced", "truncated", "grown", "gone"])
def test_a_source_that_changes_meanwhile(tmp_path: Path, change: str) -> None:
    source, out = copy_of_tiny(tmp_path), tmp_path / "out"
    shard = source / "model-00005-of-00008.safetensors"
    assert run_and_die(lambda: pack(source, out, False, killer(700_000), JOURNAL_BYTES))
    if change == "replaced":
        rewrite_header(shard, lambda table: table.update(more=table.pop("layers.3.attn_norm.weight")))
    elif change == "gone":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size + (-100 if change == "truncated" else 100))
    with pytest.raises(CheckpointError, match=shard.name):
        pack(source, out, journal_bytes=JOURNAL_BYTES)
    shutil.copy(tiny_checkpoint() / shard.name, shard)
    pack(source, out, journal_bytes=JOURNAL_BYTES)
    assert verify(out, full=True).problems == ()


def test_refusals(tmp_path: Path, packed: Path) -> None:
    source = copy_of_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="lies inside the source"):
        pack(source, source / "pack")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(CheckpointError, match="is not a pack"):
        pack(source, tmp_path / "full")
    with pytest.raises(CheckpointError, match="is a pack already"):
        pack(packed, tmp_path / "again")
    with pytest.raises(CheckpointError, match="finished pack of another checkpoint"):
        pack(tiny_checkpoint(experts=4), packed)
    (source / "model-00002-of-00008.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00008.safetensors: missing"):
        pack(source, tmp_path / "out")


@pytest.mark.parametrize("left", [0, 1, 7])
@pytest.mark.parametrize("delete_source", [False, True])
def test_a_finished_pack_is_not_that_of_another_checkpoint_which_is_damaged(
    tmp_path: Path, packed: Path, left: int, delete_source: bool
) -> None:
    other = copy_of_tiny(tmp_path, experts=4)
    for shard in sorted(other.glob("*.safetensors"))[left:]:
        shard.unlink()
    message = "another checkpoint" if left == 0 else r"-of-00008.safetensors: missing"
    with pytest.raises(CheckpointError, match=message):
        pack(other, packed, delete_source)
    assert len(list(other.glob("*.safetensors"))) == left
    pack(tiny_checkpoint(), packed)


@pytest.mark.parametrize("kind", UNREACHABLE)
def test_a_place_that_cannot_be_reached_is_named(tmp_path: Path, kind: str) -> None:
    place = unreachable(tmp_path, kind)
    with pytest.raises(CheckpointError, match=rf"{place}: cannot be packed into \(.+\); choose another place"):
        pack(tiny_checkpoint(), place)
    with pytest.raises(CheckpointError, match=str(place)):
        pack(place, tmp_path / "out")


def test_a_source_of_other_data_under_the_same_headers_is_not_deleted(tmp_path: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(tiny_checkpoint(seed=1), other)
    pack(tiny_checkpoint(), out)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"layers.0.safetensors: made from other data than .*other holds"):
            pack(other, out, delete_source=True)
    assert len(list(other.glob("*.safetensors"))) == 8
    pack(tiny_checkpoint(), out)


def test_an_incomplete_model_is_refused(tmp_path: Path) -> None:
    source = copy_of_tiny(tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_size": 256}))
    with pytest.raises(CheckpointError, match=r"expected .*`icebox verify` lists everything"):
        pack(source, tmp_path / "out")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def second(done: int, total: int) -> None:
        with pytest.raises(LockedError, match="another process is packing into it"):
            pack(tiny_checkpoint(), out)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tiny_checkpoint(), out, progress=second)
    pack(tiny_checkpoint(), out)


def test_another_source_into_a_pack_begun_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_and_die(lambda: pack(tiny_checkpoint(), out, False, killer(100_000)))
    with pytest.raises(CheckpointError, match=r"holds a pack of .*, begun earlier"):
        pack(copy_of_tiny(tmp_path), out)
