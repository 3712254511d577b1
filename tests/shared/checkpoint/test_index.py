"""From a directory to every tensor's place: against the safetensors library, at the size of the published model."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import copy_of_tiny, relay, tensor_bytes, tiny_checkpoint
from helpers.descriptors import no_descriptor_left
from helpers.services import ROOT
from safetensors import safe_open

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import INDEX_NAME, SINGLE_NAME, TensorIndex
from shared.checkpoint.safetensors_writer import TensorSpec, encode_header
from shared.checkpoint.schedule import expected_tensors
from shared.checkpoint.synth_shapes import published_config
from shared.errors import CheckpointError

TINY = ROOT / "tests" / "golden" / "tiny-a"


def rewrite_map(directory: Path, change) -> None:
    path = directory / INDEX_NAME
    table = json.loads(path.read_text())
    change(table["weight_map"])
    path.write_text(json.dumps(table))


def test_it_agrees_with_the_library():
    index = TensorIndex.open(TINY)
    seen = set()
    for path in index.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                info = index[name]
                assert (info.file, info.dtype, list(info.shape)) == (path, part.get_dtype(), part.get_shape())
                seen.add(name)
    assert seen == set(index.tensors)


def test_the_bytes_are_where_it_says():
    index = TensorIndex.open(TINY)
    for name in ("norm.weight", "layers.3.ffn.experts.15.w2.weight"):
        with safe_open(index[name].file, "pt") as file:
            assert tensor_bytes(index, name) == file.get_tensor(name).view(torch.uint8).numpy().tobytes()


def test_only_the_shards_of_the_index_count(tmp_path):
    directory = copy_of_tiny(tmp_path)
    before = TensorIndex.open(directory)
    (directory / "model-99999-of-00002.safetensors").write_bytes(b"a download that broke off")
    (directory / "golden.safetensors").write_bytes(b"")
    assert TensorIndex.open(directory) == before


def test_a_single_file_needs_no_index(tmp_path):
    names = sorted(TensorIndex.open(tiny_checkpoint(1, 4)).tensors)
    relay(tiny_checkpoint(1, 4), tmp_path / "one", [names])
    (tmp_path / "one" / INDEX_NAME).unlink()
    (tmp_path / "one" / "shard-0.safetensors").rename(tmp_path / "one" / SINGLE_NAME)
    index = TensorIndex.open(tmp_path / "one")
    assert sorted(index.tensors) == names
    assert index.files == (tmp_path / "one" / SINGLE_NAME,)


def test_a_directory_without_either_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"neither {INDEX_NAME} nor {SINGLE_NAME}"):
            TensorIndex.open(path)


def test_a_missing_shard_is_named(tmp_path):
    directory = copy_of_tiny(tmp_path)
    shard = TensorIndex.open(directory).files[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: missing; download it again"):
        TensorIndex.open(directory)


def test_a_truncated_shard_is_named_with_its_tensor(tmp_path):
    directory = copy_of_tiny(tmp_path)
    shard = TensorIndex.open(directory).files[1]
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor \S+ ends at byte .* truncated"):
        TensorIndex.open(directory)


def test_a_tensor_that_no_shard_has(tmp_path):
    directory = copy_of_tiny(tmp_path)
    rewrite_map(directory, lambda table: table.update({"layers.0.phantom": table["norm.weight"]}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.phantom should be in .*no shard has it"):
        TensorIndex.open(directory)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path):
    directory = copy_of_tiny(tmp_path)
    right = TensorIndex.open(directory)["norm.weight"].file.name
    rewrite_map(directory, lambda table: table.update({"norm.weight": table["embed.weight"]}))
    with pytest.raises(CheckpointError, match=rf"norm\.weight should be in .*, but it is in {right}"):
        TensorIndex.open(directory)


def test_a_tensor_in_two_shards(tmp_path):
    directory = copy_of_tiny(tmp_path)
    shard = TensorIndex.open(directory)["norm.weight"].file
    shutil.copy(shard, directory / "zz.safetensors")
    rewrite_map(directory, lambda table: table.update({"norm.weight": "zz.safetensors"}))
    with pytest.raises(CheckpointError, match=rf"zz\.safetensors: tensor \S+ is in {shard.name} too"):
        TensorIndex.open(directory)


def test_an_absent_tensor_is_named():
    with pytest.raises(CheckpointError, match=r"tensor layers\.0\.nothing is in no shard"):
        TensorIndex.open(TINY)["layers.0.nothing"]


def test_the_fingerprint_follows_the_headers_and_not_the_place(tmp_path):
    names = sorted(TensorIndex.open(tiny_checkpoint(1, 4)).tensors)
    half = len(names) // 2
    relay(tiny_checkpoint(1, 4), tmp_path / "a", [names])
    relay(tiny_checkpoint(1, 4), tmp_path / "b", [names])
    relay(tiny_checkpoint(1, 4), tmp_path / "reordered", [names[::-1]])
    relay(tiny_checkpoint(1, 4), tmp_path / "cut", [names[:half], names[half:]])
    a, b, reordered, cut = (TensorIndex.open(tmp_path / x).fingerprint for x in ("a", "b", "reordered", "cut"))
    assert a == b
    assert len({a, reordered, cut, TensorIndex.open(TINY).fingerprint}) == 4


def sparse_model(directory: Path) -> int:
    """The published model's headers over files that are holes; the number of its tensors."""
    config = ModelConfig.from_published(published_config("full"))
    shards: dict[str, list[TensorSpec]] = {}
    expected = expected_tensors(config)
    for name, (dtype, shape) in expected.items():
        part = name.split(".")
        shards.setdefault("-".join(part[:2]) if part[0] in ("layers", "mtp") else "rest", []).append(
            TensorSpec(name, dtype, shape)
        )
    weight_map = {}
    for shard, specs in shards.items():
        path = directory / f"{shard}.safetensors"
        header = encode_header(specs)
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(spec.nbytes for spec in specs))
        weight_map |= {spec.name: path.name for spec in specs}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return len(expected)


OPEN_AND_MEASURE = """
import sys, time
from shared.checkpoint.index import TensorIndex
began = time.process_time()
index = TensorIndex.open(sys.argv[1])
seconds = time.process_time() - began
# ru_maxrss would count the parent's memory too, which a child has until exec.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(len(index.tensors), seconds, int(peak) * 1024)
"""


def test_the_published_models_69187_tensors_in_3_seconds_and_400_mb(tmp_path):
    count = sparse_model(tmp_path)
    assert count == 69187
    command = [sys.executable, "-c", OPEN_AND_MEASURE, str(tmp_path)]
    found, seconds, peak = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert int(found) == count
    assert float(seconds) < 3.0
    assert float(peak) < 400e6


@pytest.mark.parametrize("content", ["[" * 100_000, '{"weight_map": ' * 50_000])
def test_an_index_that_nests_too_deep(tmp_path, content):
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read as an index"):
        TensorIndex.open(tmp_path)


def test_it_leaves_no_file_open():
    with no_descriptor_left():
        TensorIndex.open(TINY)


def test_it_needs_one_descriptor_at_a_time(tmp_path):
    names = sorted(TensorIndex.open(tiny_checkpoint(1, 4)).tensors)
    relay(tiny_checkpoint(1, 4), tmp_path / "many", [[name] for name in names])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        assert len(TensorIndex.open(tmp_path / "many").files) == len(names) > 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
