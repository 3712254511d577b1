"""Lists of keys say the same as masks, and attention over lists is the model's attention."""

from __future__ import annotations

import pytest
import torch
from helpers import goldens
from hypothesis import given
from hypothesis import strategies as st

from services.worker.model import key_lists
from services.worker.model.attention import Attention

CPU = torch.device("cpu")


@given(position=st.integers(0, 60), m=st.integers(1, 40), window=st.integers(1, 20))
def test_a_window_ends_with_the_token_itself(position: int, m: int, window: int) -> None:
    first = max(0, position - window + 1)
    lists = key_lists.of_window(position, m, window, CPU)
    assert lists.dtype == torch.int32
    assert lists.shape == (m, window)
    for token, row in enumerate(lists.tolist(), position):
        seen = [first + i for i in row if i >= 0]
        assert seen == list(range(max(0, token - window + 1), token + 1))


@given(position=st.integers(0, 60), window=st.integers(1, 20))
def test_a_ring_is_seen_as_far_as_it_is_written(position: int, window: int) -> None:
    rows = key_lists.of_ring(position, window, CPU)[0].tolist()
    assert rows == [i if i <= position else -1 for i in range(window)]


@given(seed=st.integers(0, 2**31), m=st.integers(1, 5), t=st.integers(0, 30), most=st.integers(0, 12))
def test_chosen_columns_are_listed_in_order(seed: int, m: int, t: int, most: int) -> None:
    order = torch.rand(m, t, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    chosen = order < torch.randint(most + 1, (m, 1), generator=torch.Generator().manual_seed(seed))
    lists = key_lists.of_chosen(chosen, most, offset=100)
    assert lists.dtype == torch.int32
    assert lists.shape == (m, min(t, most))
    for row in range(m):
        listed = [i - 100 for i in lists[row].tolist() if i >= 0]
        assert listed == chosen[row].nonzero().flatten().tolist()


@pytest.fixture
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as on a GPU."""
    monkeypatch.setattr(Attention, "attend", Attention._attend_listed)


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize(("prefill", "decode"), goldens.cases("structure-golden"))
def test_logits(prefill: int, decode: int) -> None:
    goldens.check_structure_case(goldens.shared("exact"), prefill, decode)


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("name", ["chunks_a", "chunks_b", "chunks_c"])
def test_chunked_prefill(name: str) -> None:
    goldens.check_structure_chunks(goldens.shared("exact"), name)


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("layer", range(6))
def test_attention_half(layer: int) -> None:
    goldens.check_attention_half(goldens.shared("quantised"), layer)
