"""Where prompts are cut: only where they may be, and never because of what follows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.sessions import cut_prompt


@pytest.mark.parametrize(
    ("num_tokens", "boundaries", "ends"),
    [
        (1, (), [1]),
        (10, (), [10]),
        (11, (), [10, 11]),
        (20, (), [10, 20]),
        (25, (), [10, 20, 25]),
        (9, (3, 6), [3, 6, 9]),
        (9, (2, 4, 5), [4, 9]),  # 2 and 5 are too near
        (9, (9,), [9]),
        (4, (3,), [3, 4]),  # the end always is one
        (30, (14, 15), [10, 14, 24, 30]),
        (15, (11, 13), [10, 13, 15]),
    ],
)
def test_cuts(num_tokens: int, boundaries: tuple[int, ...], ends: list[int]) -> None:
    assert cut_prompt(num_tokens, boundaries, chunk=10, min_segment=3) == ends


sizes = st.integers(1, 40)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[int]]:
    num_tokens = draw(st.integers(1, 200))
    return num_tokens, sorted(draw(st.sets(st.integers(1, num_tokens), max_size=12)))


@given(prompts(), sizes, sizes)
def test_a_prompt_is_cut_to_its_end_in_pieces_of_a_chunk_at_most(
    prompt: tuple[int, list[int]], chunk: int, min_segment: int
) -> None:
    num_tokens, boundaries = prompt
    ends = cut_prompt(num_tokens, boundaries, chunk, min_segment)
    assert ends[-1] == num_tokens
    for begin, end in itertools.pairwise([0, *ends]):
        assert 0 < end - begin <= chunk
        assert end == num_tokens or end - begin == chunk or (end in boundaries and end - begin >= min_segment)


@given(prompts(), sizes, sizes, st.data())
def test_what_follows_moves_no_cut(
    prompt: tuple[int, list[int]], chunk: int, min_segment: int, data: st.DataObject
) -> None:
    num_tokens, boundaries = prompt
    prefix = data.draw(st.integers(1, num_tokens))
    whole = cut_prompt(num_tokens, boundaries, chunk, min_segment)
    part = cut_prompt(prefix, [b for b in boundaries if b <= prefix], chunk, min_segment)
    assert part[:-1] == [end for end in whole if end < prefix]
    if prefix in boundaries and prefix - (part[-2] if len(part) > 1 else 0) >= min_segment:
        assert prefix in whole, "a conversation finds the end of its last prompt"
