"""Files made to hurt: each is refused with the file's and the tensor's name, without a crash or a large allocation."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from helpers.checkpoints import copy_of_tiny
from helpers.safetensors_bytes import entry, file_of, raw

from shared.checkpoint.index import INDEX_NAME, TensorIndex
from shared.checkpoint.manifest import MANIFEST_NAME, load_manifest, record_checksums
from shared.checkpoint.safetensors_header import MAX_HEADER_BYTES, read_header
from shared.checkpoint.verify import verify
from shared.errors import CheckpointError

GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}
DATA = bytes(11)

HOSTILE = {
    "zero size": (b"", "0 bytes are too few"),
    "seven bytes": (b"\x10\0\0\0\0\0\0", "7 bytes are too few"),
    "header beyond the file": (raw(b"{}", length=1000), "header claims 1000 bytes"),
    "header as long as can be": (raw(b"{}", length=2**64 - 1), "header claims 18446744073709551615"),
    "huge header": (raw(b"{}", b" " * 100, length=MAX_HEADER_BYTES + 1), "header claims 100000001"),
    "no JSON": (raw(b"{nonsense"), "not valid JSON"),
    "no UTF-8": (raw(b'{"\xff\xfe": 1}'), "not valid JSON"),
    "JSON that nests too deep": (raw(b"[" * 100_000), "not valid JSON"),
    "a list": (raw(b"[]"), "not a JSON object"),
    "a number": (raw(b"7"), "not a JSON object"),
    "empty header": (raw(b""), "not valid JSON"),
    "duplicate tensor": (raw(b'{"a":1,"a":2}'), "'a' twice"),
    "many tensors, one twice": (raw(b"{%s}" % b",".join(b'"%d":1' % (i % 49_999) for i in range(50_000))), "'0' twice"),
    "duplicate key inside": (raw(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0]}}'), "'dtype' twice"),
    "tensor is a list": (file_of({"a": []}), "tensor a: not a JSON object"),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"), "tensor a: unknown dtype None"),
    "wrong dtype": (file_of({"a": entry("FLOAT", [1], 0, 1)}, b"x"), "tensor a: unknown dtype 'FLOAT'"),
    "dtype of another kind": (file_of({"a": entry(["U8"], [1], 0, 1)}, b"x"), "tensor a: unknown dtype"),  # type: ignore[arg-type]
    "negative shape": (file_of({"a": entry("U8", [-1], 0, 1)}, b"x"), "tensor a: shape must be"),
    "shape of text": (file_of({"a": entry("U8", ["1"], 0, 1)}, b"x"), "tensor a: shape must be"),
    "shape true": (file_of({"a": entry("U8", [True], 0, 1)}, b"x"), "tensor a: shape must be"),
    "shape that overflows": (file_of({"a": entry("U8", [2**62, 2**62], 0, 1)}, b"x"), "tensor a: U8"),
    "largest shape": (file_of({"a": entry("F64", [2**63 - 1] * 16, 0, 1)}, b"x"), "tensor a: F64 .* bytes"),
    "shape that no float holds": (file_of({"a": entry("U8", [2**62] * 17, 0, 1)}, b"x"), "tensor a: shape has 17"),
    "many dimensions": (file_of({"a": entry("U8", [1] * 17, 0, 1)}, b"x"), "tensor a: shape has 17 dimensions"),
    "shape past 64 bits": (file_of({"a": entry("U8", [2**64], 0, 1)}, b"x"), "tensor a: shape must be"),
    "shape times size": (file_of({"a": entry("F32", [2], 0, 4)}, b"xxxx"), "tensor a: F32 .2. needs 8 bytes"),
    "negative offset": (file_of({"a": entry("U8", [1], -1, 0)}, b"x"), "tensor a: data_offsets must be"),
    "end before begin": (file_of({"a": entry("U8", [1], 1, 0)}, b"x"), "tensor a: data_offsets must be"),
    "one offset": (file_of({"a": entry("U8", [1], 0, 1) | {"data_offsets": [0]}}, b"x"), "tensor a: data_offsets"),
    "fractional offset": (file_of({"a": entry("U8", [1], 0.0, 1.0)}, b"x"), "tensor a: data_offsets must be"),
    "offset beyond the file": (file_of({"a": entry("U8", [9], 0, 9)}, b"x"), "tensor a ends at byte"),
    "offset past 64 bits": (file_of({"a": entry("U8", [1], 2**64, 2**64 + 1)}, b"x"), "tensor a: data_offsets"),
    "begins late": (file_of({"a": entry("U8", [1], 1, 2)}, b"xx"), "tensor a leaves a gap"),
    "gap": (file_of({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xxx"), "tensor b leaves a gap"),
    "overlap": (file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx"), "tensor b overlaps"),
    "same place": (file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"xx"), "tensor . overlaps"),
    "trailing bytes": (file_of(GOOD, DATA + b"x"), "1 bytes follow the last tensor"),
    "truncated data": (file_of(GOOD, DATA[:-1]), "tensor b ends at byte .* truncated"),
    "name of half a character": (file_of({"a\ud800": entry("U8", [1], 0, 1)}, b"x"), r"tensor 'a\\ud800': its name"),
    "name of an escape": (file_of({"\x1b[2J": entry("U8", [1], 0, 1)}, b"x"), r"tensor '\\x1b\[2J': its name"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "header claims"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < (1 << 20) + 50 * len(content)


def test_a_good_file_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(file_of({"__metadata__": {"x": "y"}, **GOOD}, DATA))
    infos = read_header(path)
    assert [(name, info.nbytes) for name, info in infos.items()] == [("a", 8), ("b", 3)]


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing.safetensors: cannot read \(No such file"):
        read_header(tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path)


def index_of(directory: Path) -> dict[str, dict[str, str]]:
    content: dict[str, dict[str, str]] = json.loads((directory / INDEX_NAME).read_text())
    return content


NOT_FILE_NAMES = [
    "../outside.safetensors", "/etc/passwd", "..", ".", "", "sub/x.safetensors", 7, None,
    "a\0b.safetensors", "\ud800.safetensors", "\udc80.safetensors", "\x1b[2J.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", NOT_FILE_NAMES)
def test_an_index_that_points_elsewhere(tmp_path: Path, name: object) -> None:
    directory = copy_of_tiny(tmp_path)
    index = index_of(directory)
    index["weight_map"]["norm.weight"] = name  # type: ignore[assignment]
    (directory / INDEX_NAME).write_text(json.dumps(index))
    for look in (TensorIndex.open, verify):
        with pytest.raises(CheckpointError, match=r"norm.weight is said to be in .* not a file name here"):
            look(directory)


@pytest.mark.parametrize("name", ["a\ud800", "\x1b[2J"])
def test_an_index_of_names_that_cannot_be_printed(tmp_path: Path, name: str) -> None:
    directory = copy_of_tiny(tmp_path)
    index = index_of(directory)
    index["weight_map"][name] = "model-00001-of-00008.safetensors"
    (directory / INDEX_NAME).write_text(json.dumps(index))
    for look in (TensorIndex.open, verify):
        with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}: tensor .*: its name cannot be printed") as caught:
            look(directory)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\x00"])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    directory = copy_of_tiny(tmp_path)
    (directory / INDEX_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        TensorIndex.open(directory)


def manifest_of(nbytes: str = "1", row: str = '["layers.0.ffn.experts.1", 0, 1, "0123abcd"]') -> str:
    file = f'{{"nbytes": {nbytes}, "header_sha256": "", "crc32": [{row}]}}'
    return f'{{"format": 1, "source": "s", "files": {{"f": {file}}}}}'


def test_a_good_manifest_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text(manifest_of())
    assert record_checksums(tmp_path) == {"layers.0.ffn.experts.1": 0x0123ABCD}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "RecursionError"),
        ("[]", "not a manifest"),
        ("{}", "'format'"),
        (manifest_of(nbytes="Infinity"), "nbytes must be a number of bytes, not inf"),
        (manifest_of(nbytes="1e400"), "nbytes must be a number of bytes, not inf"),
        (manifest_of(nbytes="NaN"), "nbytes must be a number of bytes, not nan"),
        (manifest_of(nbytes='"1"'), "nbytes must be a number of bytes, not '1'"),
        (manifest_of(row='["a", -1, 1, "01234567"]'), "a: offset must be a number of bytes, not -1"),
        (manifest_of(row=f'["a", 0, {2**63}, "01234567"]'), f"a: bytes must be a number of bytes, not {2**63}"),
        (manifest_of(row='["a", 0, 1, "zz"]'), "a: crc32 must be eight hex digits, not 'zz'"),
        (manifest_of(row='["a", 0, 1, "-1234567"]'), "a: crc32 must be eight hex digits, not '-1234567'"),
        (manifest_of(row='["a", 0, 1, 7]'), "a: crc32 must be eight hex digits, not 7"),
        (manifest_of(row='["a", 0, 1]'), "not a manifest"),
        (manifest_of(row="7"), "not a manifest"),
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / MANIFEST_NAME
    path.write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_manifest(tmp_path)
    assert str(path) in str(caught.value)


def test_symbolic_links(tmp_path: Path) -> None:
    directory = copy_of_tiny(tmp_path)
    shard = directory / "model-00003-of-00008.safetensors"
    blob = tmp_path / "blob"
    shard.rename(blob)
    shard.symlink_to(blob)
    assert len(TensorIndex.open(directory).tensors) > 0
    assert verify(directory).problems == ()

    for make, message in (
        (lambda: shard.symlink_to(shard), "loop|cannot be followed|levels"),
        (shard.mkdir, "regular"),
    ):
        shard.rmdir() if shard.is_dir() else shard.unlink()
        make()
        with pytest.raises(CheckpointError, match=message) as caught:
            TensorIndex.open(directory)
        assert shard.name in str(caught.value)
        assert [problem.file for problem in verify(directory).problems] == [shard.name]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    directory = copy_of_tiny(tmp_path)
    shard = directory / "model-00003-of-00008.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="not a regular file"):
        TensorIndex.open(directory)
