import pytest

from shared.readable import counted, readable_bytes


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (13_369_344, "12.8 MiB"),
        (159e9, "148.1 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_readable_bytes(count, expected):
    assert readable_bytes(count) == expected


@pytest.mark.parametrize(("count", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1234, "1,234 tokens")])
def test_nouns_agree(count, text):
    assert counted(count, "token") == text
