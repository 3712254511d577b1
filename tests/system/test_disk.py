"""Experts on disk, through the real services: packed or in place is the same; a changed file ends one request."""

import os
import re
import time
from pathlib import Path

import pytest
from helpers.checkpoints import copy_of_tiny, tiny_checkpoint
from helpers.services import generate, running, token_ids, worker_client, write_config

from shared.checkpoint.index import TensorIndex
from shared.checkpoint.pack import pack
from shared.errors import ErrorCode
from shared.protocol.messages import ErrorReply, Generate, TokensGenerated

LEAST = 8 * 28672
REQUEST = Generate(tuple(range(5, 60)), 16, temperature=0.0, top_logprobs=16)
CONFIG = {"cache": {"bytes": LEAST, "save_heat": False}}

pytestmark = pytest.mark.system


def run(directory: Path, tmp_path: Path, **sections):
    return running(write_config(tmp_path / "icebox.toml", directory, **CONFIG, **sections), "expertd", "worker")


def answer(client) -> list[tuple]:
    return [(reply.token_ids, reply.top_ids, reply.top_logprobs) for reply in generate(client, REQUEST)]


def io_error(client) -> str:
    """What the request's only error says."""
    request_id, final = client.start(REQUEST), None
    deadline = time.monotonic() + 60.0
    while not isinstance(final, ErrorReply):
        assert time.monotonic() < deadline
        event = client.poll(1.0)
        if event is not None and event[0] == request_id:
            final = event[1]
            assert not (isinstance(final, TokensGenerated) and final.finish_reason), "the request succeeded"
    assert final.code == ErrorCode.IO_ERROR
    return final.detail


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[tuple]:
    with run(tiny_checkpoint(), tmp_path_factory.mktemp("expected")) as stack, worker_client(stack.config) as client:
        return answer(client)


@pytest.fixture
def packed(tmp_path) -> Path:
    pack(tiny_checkpoint(), tmp_path / "packed")
    return tmp_path / "packed"


def test_a_pack_with_verified_reads_says_the_same(tmp_path, packed, expected):
    with run(packed, tmp_path, reader={"verify": True}) as stack, worker_client(stack.config) as client:
        assert answer(client) == expected


@pytest.mark.parametrize("change", [-1000, 1000], ids=["truncated", "grown"])
def test_a_shard_that_changes_its_size_ends_the_request_that_reads_it(tmp_path, expected, change):
    directory = copy_of_tiny(tmp_path)
    shard = directory / "model-00004-of-00008.safetensors"
    content = shard.read_bytes()
    with run(directory, tmp_path) as stack, worker_client(stack.config) as client:
        os.truncate(shard, len(content) + change)
        for _ in range(2):
            assert shard.name in io_error(client)
        shard.write_bytes(content)
        assert answer(client) == expected


def test_a_shard_that_is_replaced_is_not_read(tmp_path):
    directory = copy_of_tiny(tmp_path)
    shard = directory / "model-00004-of-00008.safetensors"
    with run(directory, tmp_path) as stack, worker_client(stack.config) as client:
        other = shard.with_suffix(".new")
        other.write_bytes(shard.read_bytes())
        other.replace(shard)
        assert f"{shard.name}: was replaced" in io_error(client)


def test_a_damaged_record_ends_the_request_that_reads_it(tmp_path, packed, expected):
    index = TensorIndex.open(packed)
    places = [index[f"layers.2.ffn.experts.{expert}.w1.weight"] for expert in range(6)]
    with run(packed, tmp_path, reader={"verify": True}) as stack, worker_client(stack.config) as client:
        assert len(token_ids(generate(client, REQUEST))) == 16
        for info in places:
            flip(info.file, info.offset)
        assert re.search(r"layers.2.safetensors: layers.2.ffn.experts.\d is damaged", io_error(client))
        for info in places:
            flip(info.file, info.offset)
        assert answer(client) == expected


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_verified_reads_of_an_unpacked_checkpoint_are_refused_at_start(tmp_path):
    config = write_config(tmp_path / "icebox.toml", tiny_checkpoint(), reader={"verify": True})
    with pytest.raises(AssertionError) as caught, running(config, "expertd"):
        pass
    assert "expertd exited with 78" in str(caught.value)
    assert "reader.verify needs the checksums of a packed checkpoint" in str(caught.value)
