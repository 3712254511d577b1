"""Experts arrive in any order, any part of them late: the bits stay, and the provider is used as agreed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from helpers import goldens
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.local_experts import LocalExperts
from shared.checkpoint.index import TensorIndex
from shared.errors import ErrorCode, ServiceError

PREFILL, DECODE = 20, 4


class UnsteadyExperts:
    """Every record is resident or not at random, and comes in random order; notes every call."""

    def __init__(self, seed: int, wave_experts: int) -> None:
        config = goldens.shared("quantised").model.config
        self._random = random.Random(seed)
        self._local = LocalExperts(TensorIndex.open(goldens.TINY_A), config, 1 << 28)
        self.wave_experts = wave_experts
        self.calls: list[tuple[object, ...]] = []
        self.failing_wait = 0
        self.open: UnsteadyLookUp | None = None

    def look_up(self, layer: int, expert_ids: Sequence[int], ahead: Sequence[int] = ()) -> UnsteadyLookUp:
        assert self.open is None, "one look-up is open at a time"
        self.calls.append(("look_up", layer, tuple(expert_ids), tuple(ahead)))
        records = {expert: self._local.read(layer, expert) for expert in expert_ids}
        shuffled = self._random.sample(list(records), len(records))
        late = self._random.randint(0, len(records))
        self.open = UnsteadyLookUp(
            self, {e: records[e] for e in shuffled[late:]}, {e: records[e] for e in shuffled[:late]}
        )
        return self.open

    def hint(self, layer: int, expert_ids: Sequence[int]) -> None:
        self.calls.append(("hint", layer, tuple(expert_ids)))

    def guess(self, layer: int, choose: Callable[[], Sequence[int]]) -> None:
        self.calls.append(("guess", layer, tuple(choose())))

    @contextmanager
    def step(self) -> Iterator[None]:
        yield


class UnsteadyLookUp:
    def __init__(self, experts: UnsteadyExperts, hits: dict[int, torch.Tensor], late: dict[int, torch.Tensor]) -> None:
        self._experts = experts
        self._late = late
        self.hits: Mapping[int, torch.Tensor] = hits

    def wait(self) -> Mapping[int, torch.Tensor]:
        self._experts.calls.append(("wait",))
        if self._experts.calls.count(("wait",)) == self._experts.failing_wait:
            self._experts.open = None
            raise ServiceError(ErrorCode.IO_ERROR, "unreadable")
        return self._late

    def done(self) -> None:
        """The records may now become something else, and do."""
        self._experts.calls.append(("done",))
        self._experts.open = None
        for record in (*self.hits.values(), *self._late.values()):
            record.fill_(0x7F)


def _run(experts: UnsteadyExperts | LocalExperts, chunk: int = PREFILL) -> torch.Tensor:
    model, ids = goldens.shared("quantised").model, goldens.token_ids()
    state, rows = model.new_state(PREFILL + DECODE), []
    for begin in range(0, PREFILL, chunk):
        rows.append(model.forward(state, ids[begin : begin + chunk], experts))
    rows += [model.forward(state, [token], experts) for token in ids[PREFILL : PREFILL + DECODE]]
    return torch.stack(rows[-DECODE - 1 :])


@pytest.fixture(scope="module")
def steady() -> torch.Tensor:
    return _run(goldens.shared("quantised").experts)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), wave=st.integers(1, 16))
def test_order_and_lateness_change_no_bit(steady: torch.Tensor, seed: int, wave: int) -> None:
    assert _run(UnsteadyExperts(seed, wave)).equal(steady)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31), wave=st.integers(1, 16))
def test_look_ups_follow_the_contract(seed: int, wave: int) -> None:
    """Ascending, distinct, no more than a wave; the next wave named ahead; waited for, then done, before the next."""
    experts = UnsteadyExperts(seed, wave)
    _run(experts)
    calls = [call for call in experts.calls if call[0] not in ("hint", "guess")]
    assert [call[0] for call in calls] == ["look_up", "wait", "done"] * (len(calls) // 3)
    look_ups = [call[1:] for call in calls if call[0] == "look_up"]
    for (layer, ids, ahead), following in zip(look_ups, [*look_ups[1:], None], strict=True):
        assert list(ids) == sorted(set(ids))
        assert 1 <= len(ids) <= wave
        if ahead:
            assert following is not None
            assert following[:2] == (layer, ahead)
        elif following is not None:
            assert following[0] != layer, "a layer's last wave names nothing ahead"


def test_hash_layers_are_announced_before_anything_is_looked_up() -> None:
    """Layer 1's experts follow from the token ids; layer 0's are asked for at once anyway."""
    experts = UnsteadyExperts(0, 16)
    _run(experts)
    table = TensorIndex.open(goldens.TINY_A)
    assert "layers.1.ffn.gate.tid2eid" in table.tensors
    first = [call for call in experts.calls if call[0] in ("hint", "look_up")][:3]
    assert [call[0] for call in first] == ["hint", "look_up", "look_up"]
    assert first[0][1] == 1
    assert first[0][2] == first[2][2], "what was announced is what is looked up"
    assert first[2][1] == 1


def test_decode_guesses_the_experts_of_the_next_layer_where_its_router_decides() -> None:
    """Between this layer's look-up and the next one's, and more often right than chance."""
    experts = UnsteadyExperts(0, 16)
    _run(experts)
    config = goldens.shared("quantised").model.config
    calls = [call for call in experts.calls if call[0] in ("guess", "look_up")]
    guesses = [i for i, call in enumerate(calls) if call[0] == "guess"]
    scored = config.num_hidden_layers - max(1, config.num_hash_layers)
    assert len(guesses) == DECODE * scored, "decode only"
    right = 0
    for i in guesses:
        _, layer, chosen = calls[i]
        assert calls[i - 1][1] == layer - 1
        assert calls[i + 1][1] == layer
        assert len(set(chosen)) == config.num_experts_per_tok
        right += len(set(chosen) & set(calls[i + 1][2]))
    chance = config.num_experts_per_tok / config.n_routed_experts
    assert right / len(guesses) / config.num_experts_per_tok > chance


@pytest.mark.parametrize("wait", [1, 5, 13])
def test_a_failed_read_passes_through_and_leaves_nothing(wait: int, steady: torch.Tensor) -> None:
    experts = UnsteadyExperts(1, 4)
    model, ids = goldens.shared("quantised").model, goldens.token_ids()
    state = model.new_state(PREFILL + DECODE)
    experts.failing_wait = wait
    with pytest.raises(ServiceError, match="unreadable"):
        model.forward(state, ids[:PREFILL], experts)
    state.reset()
    rows = [model.forward(state, ids[:PREFILL], goldens.shared("quantised").experts)]
    rows += [model.forward(state, [t], goldens.shared("quantised").experts) for t in ids[PREFILL : PREFILL + DECODE]]
    assert torch.stack(rows).equal(steady)
