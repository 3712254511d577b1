"""Records of a packed checkpoint are compared with their checksums as they are read, if the config says so."""

from __future__ import annotations

import mmap
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import tiny_checkpoint

from services.expertd.landing import HostSlot, Staging
from services.expertd.reader import RecordReader
from services.expertd.reads import AsyncReads
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.manifest import record_checksums
from shared.checkpoint.pack import pack
from shared.checkpoint.records import ExpertRecords
from shared.errors import CheckpointError


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(tiny_checkpoint(), tmp_path / "packed")
    return tmp_path / "packed"


def read(directory: Path, checksums: dict[str, int] | None, expert: int = 3) -> np.ndarray:
    records = ExpertRecords(TensorIndex.open(directory), ModelConfig.from_dir(directory))
    slot = np.frombuffer(mmap.mmap(-1, records.layout.slot_bytes), np.uint8)
    with closing(RecordReader(True, 4, checksums)) as reader, closing(AsyncReads()) as reads:
        reader.read(records.plan(2, expert), HostSlot(slot, Staging()), reads)
    return slot[: records.layout.record_bytes]


def test_whole_records_pass_and_are_the_same_as_in_place(packed: Path) -> None:
    assert np.array_equal(read(packed, record_checksums(packed)), read(tiny_checkpoint(), None))


@pytest.mark.parametrize("tensor", ["w1.weight", "w3.scale", "w2.weight"])
def test_a_flipped_bit_is_found_and_named(packed: Path, tensor: str) -> None:
    info = TensorIndex.open(packed)[f"layers.2.ffn.experts.3.{tensor}"]
    with info.file.open("r+b") as file:
        file.seek(info.offset + 9)
        byte = file.read(1)[0]
        file.seek(info.offset + 9)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(CheckpointError, match=r"layers.2.safetensors: layers.2.ffn.experts.3 is damaged"):
        read(packed, record_checksums(packed))
    read(packed, record_checksums(packed), expert=4)
    read(packed, None)


def test_an_unpacked_checkpoint_has_nothing_to_verify_against() -> None:
    with pytest.raises(CheckpointError, match=r"reader.verify needs the checksums of a packed checkpoint"):
        record_checksums(tiny_checkpoint())
