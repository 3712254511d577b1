"""Records: the layout in a slot, the fewest reads that fill it, and what happens to damaged files."""

import functools
import itertools
import os

import pytest
from helpers.checkpoints import copy_of_tiny, relay, tensor_bytes, tiny_checkpoint
from helpers.services import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import LARGEST_HOLE, PARTS, ExpertRecords, RecordLayout, least_slots
from shared.checkpoint.safetensors_header import DTYPE_BITS, TensorInfo
from shared.checkpoint.synth_shapes import published_config
from shared.errors import CheckpointError

FULL = ModelConfig.from_published(published_config("full"))
TINY = ROOT / "tests" / "golden" / "tiny-a"
PREFIX = "layers.0.ffn.experts.0."


def test_the_published_models_record_is_12_75_mib_and_fills_its_slot():
    layout = RecordLayout.of(FULL)
    assert layout.record_bytes == layout.slot_bytes == 51 * 2**18
    assert [part.name for part in layout.parts] == list(PARTS)


@pytest.mark.parametrize("width", ["full", "small", "tiny"])
def test_parts_follow_each_other_without_gaps(width):
    layout = RecordLayout.of(ModelConfig.from_published(published_config(width)))
    end = 0
    for part in layout.parts:
        assert part.offset == end
        assert part.nbytes == part.shape[0] * part.shape[1] * DTYPE_BITS[part.dtype] // 8
        end += part.nbytes
    assert layout.record_bytes == end
    assert layout.slot_bytes % 4096 == 0
    assert 0 <= layout.slot_bytes - end < 4096


def test_the_smallest_pool_holds_two_look_ups():
    assert least_slots(FULL) == 12


@pytest.mark.parametrize("directory", [TINY, None], ids=["golden", "synthetic"])
def test_a_record_is_its_six_tensors(directory):
    directory = directory or tiny_checkpoint()
    index, config = TensorIndex.open(directory), ModelConfig.from_dir(directory)
    records = ExpertRecords(index, config)
    for layer in range(config.num_moe_layers):
        for expert in (0, config.n_routed_experts - 1):
            out = bytearray(records.layout.record_bytes)
            records.read_record(layer, expert, memoryview(out))
            prefix = f"{config.layer_prefix(layer)}ffn.experts.{expert}."
            assert bytes(out) == b"".join(tensor_bytes(index, prefix + part) for part in PARTS)


def test_bytes_behind_the_record_stay_what_they_are():
    records = ExpertRecords(*golden()[::-1])
    out = bytearray(b"\xaa" * (records.layout.record_bytes + 100))
    records.read_record(0, 0, memoryview(out))
    assert out[records.layout.record_bytes :] == b"\xaa" * 100


@functools.cache
def golden() -> tuple[ModelConfig, TensorIndex]:
    return ModelConfig.from_dir(TINY), TensorIndex.open(TINY)


class Disk:
    """The six tensors of one expert at chosen places, as an index knows them."""

    def __init__(self, order, gaps, files):
        config, real = golden()
        self.tensors, ends = {}, {}
        for name, gap, file in zip(order, gaps, files, strict=True):
            info = real[PREFIX + name]
            path = real.directory / f"f{file}"
            offset = ends.get(path, 8) + gap
            self.tensors[PREFIX + name] = TensorInfo(path, info.dtype, info.shape, offset, info.nbytes)
            ends[path] = offset + info.nbytes
        index = TensorIndex(real.directory, self.tensors, tuple(ends), "")
        self.layout = RecordLayout.of(config)
        self.plan = ExpertRecords(index, config).plan(0, 0)


def test_neighbours_in_slot_order_are_one_read_in_one_piece():
    plan = Disk(PARTS, [0] * 6, [0] * 6).plan
    assert [len(extent.pieces) for extent in plan.extents] == [1]
    assert plan.name == "layers.0.ffn.experts.0"


def test_a_small_hole_is_read_across_and_a_large_one_is_not():
    near, far = [0, 0, 0, LARGEST_HOLE, 0, 0], [0, 0, 0, LARGEST_HOLE + 1, 0, 0]
    assert len(Disk(PARTS, near, [0] * 6).plan.extents) == 1
    assert len(Disk(PARTS, far, [0] * 6).plan.extents) == 2


def test_other_files_are_other_reads():
    plan = Disk(PARTS, [0] * 6, [0, 1, 0, 1, 0, 1]).plan
    assert [extent.file.name for extent in plan.extents] == ["f0", "f1"]


PLACES = st.tuples(
    st.permutations(PARTS),
    st.lists(st.sampled_from([0, 1, 4096, LARGEST_HOLE, LARGEST_HOLE + 1, 10**9]), min_size=6, max_size=6),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(PLACES)
def test_any_plan_takes_every_byte_from_its_place_to_its_place_once(places):
    disk = Disk(*places)
    part_at = {part.offset: part for part in disk.layout.parts}
    wanted = {
        target: (disk.tensors[PREFIX + part.name].file, disk.tensors[PREFIX + part.name].offset, part.nbytes)
        for target, part in part_at.items()
    }
    covered = 0
    for extent in disk.plan.extents:
        first = min(piece.source for piece in extent.pieces)
        last = max(piece.source + piece.nbytes for piece in extent.pieces)
        assert (first, last) == (0, extent.nbytes), "reads more than it needs at an end"
        for source, target, nbytes in extent.pieces:
            covered += nbytes
            while nbytes:
                file, offset, size = wanted.pop(target)
                assert (extent.file, extent.offset + source) == (file, offset)
                source, target, nbytes = source + size, target + size, nbytes - size
    assert not wanted
    assert covered == disk.layout.record_bytes


@settings(max_examples=150, deadline=None)
@given(PLACES)
def test_no_two_reads_could_be_one(places):
    extents = Disk(*places).plan.extents
    for left, right in itertools.pairwise(extents):
        assert left.file < right.file or right.offset - (left.offset + left.nbytes) > LARGEST_HOLE


def test_a_tensor_of_another_shape_is_named():
    config, index = golden()
    name = "layers.2.ffn.experts.3.w3.scale"
    tensors = dict(index.tensors) | {name: index[name]._replace(dtype="U8")}
    records = ExpertRecords(TensorIndex(index.directory, tensors, index.files, ""), config)
    with pytest.raises(CheckpointError, match=rf"tensor {name} is U8 \[128, 4\], expected F8_E8M0 \[128, 4\]"):
        records.plan(2, 3)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is in no shard"):
        records.plan(2, 3)


def test_plans_are_made_once():
    config, index = golden()
    records = ExpertRecords(index, config)
    assert records.plan(1, 2) is records.plan(1, 2)
    assert records.plan(1, 2) != records.plan(2, 1)


def test_a_file_cut_after_it_was_opened_is_named(tmp_path):
    directory = copy_of_tiny(tmp_path)
    records = ExpertRecords(TensorIndex.open(directory), ModelConfig.from_dir(directory))
    extent = records.plan(1, 0).extents[0]
    out = memoryview(bytearray(records.layout.record_bytes))
    os.truncate(extent.file, extent.offset + extent.nbytes - 1)
    with pytest.raises(CheckpointError, match=f"{extent.file.name}: ends before byte {extent.offset + extent.nbytes}"):
        records.read_record(1, 0, out)
    extent.file.unlink()
    with pytest.raises(CheckpointError, match=rf"{extent.file.name}: cannot read \(No such file"):
        records.read_record(1, 0, out)


def test_extra_blocks_come_after_the_layers():
    config, index = golden()
    assert ExpertRecords(index, config).plan(6, 2).name == "mtp.0.ffn.experts.2"


def test_reordering_a_checkpoint_changes_no_record(tmp_path):
    names = sorted(TensorIndex.open(tiny_checkpoint(1, 4)).tensors)
    relay(tiny_checkpoint(1, 4), tmp_path / "b", [names[::2], names[1::2]])
    config = ModelConfig.from_dir(tiny_checkpoint(1, 4))
    outs = []
    for directory in (tiny_checkpoint(1, 4), tmp_path / "b"):
        records = ExpertRecords(TensorIndex.open(directory), config)
        outs.append(bytearray(records.layout.record_bytes))
        records.read_record(0, 3, memoryview(outs[-1]))
    assert outs[0] == outs[1]
