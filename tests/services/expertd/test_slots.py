"""When a retired slot is free again."""

import pytest

from services.expertd.policy import Key
from services.expertd.slots import IDLE_GRACE_S, Slots, WorkerView


def view(clock: int = 0, busy: bool = True, attached: bool = True, now: float = 0.0) -> WorkerView:
    return WorkerView(clock, busy, attached, now)


@pytest.mark.parametrize(
    ("later", "is_free"),
    [
        (view(clock=5), False),
        (view(clock=6), False),
        (view(clock=7), True),
        (view(clock=5, busy=False), False),
        (view(clock=5, busy=False, now=IDLE_GRACE_S), True),
        (view(clock=5, busy=True, now=1000.0), False),
        (view(clock=5, attached=False), True),
    ],
)
def test_a_slot_retired_at_clock_five(later, is_free):
    slots = Slots(1)
    slots.retire(slots.take(), Key(0, 0), view(clock=5))
    slots.reclaim(later)
    assert (slots.num_free, slots.num_retired) == ((1, 0) if is_free else (0, 1))


def test_while_the_worker_stands_still_only_what_it_holds_stays():
    slots = Slots(3)
    taken = [slots.take() for _ in range(3)]
    for slot in taken:
        slots.retire(slot, Key(0, slot), view(clock=5))
    slots.reclaim_all_but(frozenset(taken[1:2]))
    assert (slots.num_free, slots.num_retired) == (2, 1)
    slots.reclaim(view(clock=7))
    assert slots.num_free == 3
    assert slots.take() is not None


def test_what_was_given_up_is_there_until_its_slot_is_free():
    slots, key = Slots(2), Key(1, 2)
    slot = slots.take()
    assert slots.revive(key) is None
    slots.retire(slot, key, view(clock=5))
    assert slots.revive(Key(1, 3)) is None
    assert slots.revive(key) == slot
    assert (slots.num_free, slots.num_retired) == (1, 0)
    slots.retire(slot, key, view(clock=6))
    slots.reclaim(view(clock=8))
    assert slots.revive(key) is None


def test_none_when_nothing_is_free():
    assert Slots(0).take() is None
