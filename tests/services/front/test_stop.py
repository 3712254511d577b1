"""Stop texts in pieces: what a search in the whole text says, whatever the cuts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.front.stop import StopFinder

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def expected(text, stops):
    """By definition: at the first place where a stop text ends, the longest that ends there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces, stops):
    finder = StopFinder(stops)
    out = ""
    for piece in pieces:
        out += finder.feed(piece)
        if finder.found is not None:
            return out, finder.found
    return out + finder.flush(), None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_any_cut_gives_what_the_whole_text_says(text, stops, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert run(pieces, stops) == expected(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_nothing_settled_is_ever_part_of_a_stop_text(text, stops):
    finder = StopFinder(stops)
    said = ""
    for letter in text:
        said += finder.feed(letter)
        if finder.found is not None:
            break
        assert expected(text, stops)[0].startswith(said)


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        ([], ["abc"], "abc", None),
        (["b"], ["abc"], "a", "b"),
        (["aab"], ["aaab"], "a", "aab"),
        (["abab"], ["ab", "a", "bb"], "", "abab"),
        (["b", "ab"], ["xab"], "x", "ab"),
        (["abc", "b"], ["abc"], "a", "b"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["never"], ["nev", "e"], "neve", None),
    ],
)
def test_examples(stops, pieces, text, found):
    assert run(pieces, stops) == (text, found)


def test_what_cannot_be_a_stop_text_comes_at_once():
    finder = StopFinder(["stop"])
    assert finder.feed("go st") == "go "
    assert finder.feed("art ") == "start "
