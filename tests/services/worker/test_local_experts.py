"""Experts read in process: the bytes of the file, a cache of the size asked for, least recently used out first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import goldens

from services.worker.local_experts import LocalExperts
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ExpertRecords
from shared.errors import CheckpointError

CONFIG = ModelConfig.from_dir(goldens.TINY_A)
SLOT = ExpertRecords(TensorIndex.open(goldens.TINY_A), CONFIG).layout.slot_bytes


def _experts(slots: int, directory: Path = goldens.TINY_A) -> LocalExperts:
    return LocalExperts(TensorIndex.open(directory), CONFIG, slots * SLOT)


def _use(experts: LocalExperts, layer: int, *ids: int) -> list[int]:
    """Looks up and finishes; returns which were missing."""
    look_up = experts.look_up(layer, ids)
    missing = look_up.wait()
    assert sorted([*look_up.hits, *missing]) == list(ids)
    look_up.done()
    return list(missing)


def test_records_are_the_files_bytes() -> None:
    records = ExpertRecords(TensorIndex.open(goldens.TINY_A), CONFIG)
    expected = torch.empty(records.layout.record_bytes, dtype=torch.uint8)
    records.read_record(6, 3, expected.numpy().data)
    assert torch.equal(_experts(4).look_up(6, [3]).wait()[3], expected)


def test_least_recently_used_leaves_first() -> None:
    experts = _experts(3)
    assert _use(experts, 0, 1, 2, 3) == [1, 2, 3]
    assert _use(experts, 0, 1) == []
    assert _use(experts, 0, 4) == [4]
    assert _use(experts, 0, 1, 3, 4) == [], "2 was used longest ago"
    assert _use(experts, 0, 2) == [2]


def test_layers_do_not_share_records() -> None:
    experts = _experts(8)
    assert _use(experts, 0, 5) == [5]
    assert _use(experts, 1, 5) == [5]


@pytest.mark.parametrize(("slots", "wave"), [(0, 4), (3, 4), (9, 9)])
def test_a_tokens_experts_always_fit_one_look_up(slots: int, wave: int) -> None:
    assert _experts(slots).wave_experts == wave


def test_records_survive_eviction_while_held() -> None:
    experts = _experts(1)
    look_up = experts.look_up(0, [1, 2, 3, 4])
    held = look_up.wait()
    before = {expert: record.clone() for expert, record in held.items()}
    _use(experts, 1, 1, 2, 3, 4)
    assert all(torch.equal(held[expert], before[expert]) for expert in before)


def test_names_a_file_that_was_cut(tmp_path: Path) -> None:
    directory = shutil.copytree(goldens.TINY_A, tmp_path / "checkpoint")
    experts = _experts(4, directory)
    shards = sorted(directory.glob("model-*.safetensors"))
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:10_000])
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-00002\.safetensors.*truncated"):
        experts.look_up(6, [15]).wait()
