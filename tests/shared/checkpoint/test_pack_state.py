"""A pack's journal: one that is damaged is named, and never believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import tiny_checkpoint
from helpers.packing import JOURNAL_BYTES, assert_same_tree, killer, run_and_die

from shared.checkpoint.pack import pack
from shared.errors import CheckpointError

NO_JOURNAL = ["", "{", "[]", "7", "null", "{}", "[" * 100_000, "\0"]


def damaged(table: dict[str, Any], **changes: Any) -> str:
    return json.dumps(table | changes)


def of_source(table: dict[str, Any]) -> list[str]:
    name, row = next(iter(table["tensors"].items()))
    rows = [["f"], [*row, 0], [row[0], "ZZ", *row[2:]], [*row[:3], row[3] + 8, row[4]], [*row[:4], row[4] + 1], 7, None]
    tensors = [table["tensors"] | {name: row} for row in rows]
    return [damaged(table, tensors=value) for value in (*tensors, {}, [], 7)] + [damaged(table, directory=7)]


def of_file(table: dict[str, Any]) -> list[str]:
    file, rows = table["file"], table["file"]["crc32"]
    lists = [[], 7, rows[:-1], rows * 3, rows[1:], [["a", 0, 1, "zz"]], [["a", *rows[0][1:]], *rows[1:]]]
    files = [{}, [], file | {"nbytes": 1}, file | {"header_sha256": ""}, *(file | {"crc32": value} for value in lists)]
    return [damaged(table, file=value) for value in files] + [damaged(table, complete=value) for value in (1, None, [])]


@pytest.mark.parametrize(
    ("name", "cases"), [("source.json", of_source), ("layers.0.safetensors.json", of_file)], ids=["source", "file"]
)
def test_a_damaged_journal_is_named(tmp_path: Path, name: str, cases: Callable[[dict[str, Any]], list[str]]) -> None:
    out = tmp_path / "out"
    assert run_and_die(lambda: pack(tiny_checkpoint(), out, False, killer(900_000), JOURNAL_BYTES))
    path = out / ".pack" / name
    for content in NO_JOURNAL + cases(json.loads(path.read_text())):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=rf"{name}: damaged .*delete it and give the same command"):
            pack(tiny_checkpoint(), out)
    path.unlink()
    for directory in (out, tmp_path / "fresh"):
        pack(tiny_checkpoint(), directory)
    assert_same_tree(out, tmp_path / "fresh")


def test_a_journal_that_stops_where_nobody_does_is_damaged(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_and_die(lambda: pack(tiny_checkpoint(), out, False, killer(900_000), JOURNAL_BYTES))
    path = out / ".pack" / "layers.0.safetensors.json"
    table = json.loads(path.read_text())
    del table["file"]["crc32"][-1]
    path.write_text(damaged(table, complete=False))
    with pytest.raises(CheckpointError, match=r"layers.0.safetensors.json: damaged"):
        pack(tiny_checkpoint(), out)
