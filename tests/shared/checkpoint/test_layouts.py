"""Any cut into shards and any order inside them: index, record reads, verification and packing give the same bytes."""

from __future__ import annotations

import filecmp
import tempfile
from pathlib import Path

from helpers.checkpoints import relay, tensor_bytes, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.manifest import MANIFEST_NAME
from shared.checkpoint.pack import pack
from shared.checkpoint.records import ExpertRecords
from shared.checkpoint.verify import verify

LAYERS, EXPERTS = 1, 4


@st.composite
def cuts(draw: st.DrawFn) -> list[list[str]]:
    """The tensor names, shuffled (wholly, or only a few moved), in one to four shards."""
    names = sorted(TensorIndex.open(tiny_checkpoint(LAYERS, EXPERTS)).tensors)
    if draw(st.booleans()):
        names = draw(st.permutations(names))
    else:
        for _ in range(draw(st.integers(0, 5))):
            names.insert(draw(st.integers(0, len(names) - 1)), names.pop(draw(st.integers(0, len(names) - 1))))
    ends = sorted({*draw(st.lists(st.integers(1, len(names) - 1), max_size=3)), len(names)})
    return [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=25, deadline=None)
@given(cuts(), st.booleans())
def test_round_trip(shards: list[list[str]], delete_source: bool) -> None:
    original = tiny_checkpoint(LAYERS, EXPERTS)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        relay(original, source, shards)
        assert verify(source, full=True).problems == ()
        assert_same_records(original, source)
        pack(source, out, delete_source)
        assert verify(out, full=True).problems == ()
        before, after = TensorIndex.open(original), TensorIndex.open(out)
        assert all(tensor_bytes(before, name) == tensor_bytes(after, name) for name in before.tensors)
        assert len(list(source.glob("*.safetensors"))) == (0 if delete_source else len(shards))
        pack(original, Path(folder) / "again")
        for path in (path for path in out.glob("*.*") if path.name != MANIFEST_NAME and path.suffix != ".json"):
            assert filecmp.cmp(path, Path(folder) / "again" / path.name, shallow=False)


def assert_same_records(left: Path, right: Path) -> None:
    config = ModelConfig.from_dir(left)
    ours, theirs = (ExpertRecords(TensorIndex.open(path), config) for path in (left, right))
    size = ours.layout.record_bytes
    for layer in range(config.num_moe_layers):
        for expert in range(config.n_routed_experts):
            one, two = bytearray(size), bytearray(size)
            ours.read_record(layer, expert, memoryview(one))
            theirs.read_record(layer, expert, memoryview(two))
            assert one == two
