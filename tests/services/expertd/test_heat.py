"""Heat survives a restart, and nothing that is wrong with the file matters."""

import pytest

from services.expertd.heat import load_heat, save_heat
from services.expertd.policy import Key

USES = {Key(0, 3): 7, Key(2, 0): 1}


def test_round_trip_and_no_draft_left(tmp_path):
    save_heat(tmp_path / "heat.json", "f", USES)
    assert load_heat(tmp_path / "heat.json", "f", 3, 4) == USES
    assert [p.name for p in tmp_path.iterdir()] == ["heat.json"]


def test_foreign_and_out_of_range_heat_is_ignored(tmp_path):
    save_heat(tmp_path / "heat.json", "f", USES)
    assert load_heat(tmp_path / "heat.json", "other", 3, 4) == {}
    assert load_heat(tmp_path / "heat.json", "f", 1, 4) == {Key(0, 3): 7}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"fingerprint": "f"}',
        b'{"fingerprint": "f", "uses": [[1]]}',
        b'{"fingerprint": "f", "uses": [[0, 1, null]]}',
        b'{"fingerprint": "f", "uses": [[0, 1, Infinity]]}',
    ],
)
def test_a_damaged_file_is_ignored(tmp_path, content):
    (tmp_path / "heat.json").write_bytes(content)
    assert load_heat(tmp_path / "heat.json", "f", 3, 4) == {}


def test_a_missing_file_and_a_missing_directory(tmp_path):
    assert load_heat(tmp_path / "heat.json", "f", 3, 4) == {}
    save_heat(tmp_path / "no" / "heat.json", "f", USES)
