import pytest

from services.front.effort import EFFORTS, effort_level

PLAIN = {None}
PREVIEW = {None, "high", "max"}
LATER = {None, "low", "high", "max"}


@pytest.mark.parametrize(
    ("asked", "plain", "preview", "later"),
    [
        (None, None, None, None),
        ("minimal", None, None, "low"),
        ("low", None, None, "low"),
        ("medium", None, None, "low"),
        ("high", None, "high", "high"),
        ("xhigh", None, "high", "high"),
        ("max", "max", "max", "max"),  # a checkpoint that has no such text says so itself
    ],
)
def test_words_become_levels(asked, plain, preview, later):
    assert [effort_level(asked, levels) for levels in (PLAIN, PREVIEW, LATER)] == [plain, preview, later]


def test_every_word_is_in_the_table():
    assert set(EFFORTS) == {"minimal", "low", "medium", "high", "xhigh", "max"}


def test_an_unknown_word_is_left_to_be_refused():
    assert effort_level("huge", LATER) == "huge"
