"""Weights from files: values, and errors that name file and tensor."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from helpers import goldens
from safetensors.torch import load_file

import kernels
from services.worker.model import Model
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.safetensors_header import TensorInfo
from shared.errors import CheckpointError


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    files = sorted(goldens.TINY_A.glob("model-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def copy(tmp_path: Path) -> TensorIndex:
    """The checkpoint's index over files that may be damaged."""
    return TensorIndex.open(shutil.copytree(goldens.TINY_A, tmp_path / "checkpoint"))


def test_every_dense_tensor_is_read_as_stored(tensors: dict[str, torch.Tensor]) -> None:
    reader = WeightReader(TensorIndex.open(goldens.TINY_A))
    for name, expected in tensors.items():
        got = reader.stored(name)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
        assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8)), name


def test_linears_lie_above_each_other(tensors: dict[str, torch.Tensor]) -> None:
    reader = WeightReader(TensorIndex.open(goldens.TINY_A))
    names = ["layers.0.attn.wq_a", "layers.0.attn.wkv"]
    expected = [kernels.dequant_fp8(tensors[f"{n}.weight"], tensors[f"{n}.scale"]) for n in names]
    assert torch.equal(reader.linear(*names), torch.cat(expected))


def test_names_a_missing_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_z\.weight"):
        WeightReader(TensorIndex.open(goldens.TINY_A)).linear("layers.0.attn.wq_z")


def test_names_a_file_cut_after_its_header_was_read(copy: TensorIndex) -> None:
    info = copy["head.weight"]
    with info.file.open("r+b") as file:
        file.truncate(info.offset + info.nbytes // 2)
    with pytest.raises(CheckpointError, match=rf"{info.file.name}: ends inside tensor head\.weight"):
        Model.load(copy, ModelConfig.from_dir(goldens.TINY_A), 64)


def test_names_a_file_that_went_away(copy: TensorIndex) -> None:
    info = copy["embed.weight"]
    info.file.unlink()
    with pytest.raises(CheckpointError, match=rf"{info.file.name}: cannot read tensor embed\.weight"):
        Model.load(copy, ModelConfig.from_dir(goldens.TINY_A), 64)


def test_names_a_type_that_the_model_has_no_use_for(copy: TensorIndex) -> None:
    strange = copy["norm.weight"]._replace(dtype="F64")
    index = dataclasses.replace(copy, tensors={**copy.tensors, "norm.weight": strange})
    with pytest.raises(CheckpointError, match=r"norm\.weight has type F64"):
        WeightReader(index).float32("norm.weight")


def test_load_says_what_it_is_at() -> None:
    said: list[tuple[str, int, int]] = []
    index = TensorIndex.open(goldens.TINY_A)
    Model.load(index, ModelConfig.from_dir(goldens.TINY_A), 64, progress=lambda *args: said.append(args))
    assert [text for text, _, _ in said] == [
        "weights: embedding and head",
        *(f"weights: layer {number} of 6" for number in range(1, 7)),
        "weights: MTP block",
        "weights: all read",
    ]
    done = [count for _, count, _ in said]
    assert done == sorted(done)
    (total,) = {total for _, _, total in said}
    assert (done[0], done[-1]) == (0, total)
    assert total == sum(info.nbytes for name, info in index.tensors.items() if ".experts." not in name)


def write_row(index: TensorIndex, row: list[int]) -> TensorInfo:
    """As the eighth of a table of experts."""
    info = index["layers.1.ffn.gate.tid2eid"]
    with info.file.open("r+b") as file:
        file.seek(info.offset + 8 * 4 * 7)
        file.write(torch.tensor(row).numpy().tobytes())
    return info


@pytest.mark.parametrize("row", [[0, 1, 2, 16], [-1, 0, 1, 2]])
def test_refuses_a_table_that_names_experts_that_are_not_there(copy: TensorIndex, row: list[int]) -> None:
    info = write_row(copy, row)
    with pytest.raises(CheckpointError, match=rf"{info.file.name}: tensor layers\.1\.ffn\.gate\.tid2eid names experts"):
        Model.load(copy, ModelConfig.from_dir(goldens.TINY_A), 64)


def test_says_where_a_table_names_an_expert_twice(copy: TensorIndex, caplog: pytest.LogCaptureFixture) -> None:
    write_row(copy, [3, 1, 2, 3])
    Model.load(copy, ModelConfig.from_dir(goldens.TINY_A), 64)
    assert "tensor layers.1.ffn.gate.tid2eid names an expert twice for 1 tokens" in caplog.text
