"""The pool in shared memory: how many slots, where each one is, and what a worker is told."""

import numpy as np
import pytest
from helpers.services import ROOT

from services.expertd.landing import make_landing
from services.expertd.policy import Key
from services.expertd.pool import Pool, reserve_for, slots_for
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout
from shared.errors import CapacityError
from shared.memory.control_block import ControlBlock
from shared.memory.host import HostSlab

MODEL = ModelConfig.from_dir(ROOT / "tests" / "golden" / "tiny-a")
SLOT_BYTES = RecordLayout.of(MODEL).slot_bytes
ALL = 7 * 16


@pytest.mark.parametrize(
    ("cache_bytes", "slots"),
    [(8 * SLOT_BYTES, 8), (9 * SLOT_BYTES - 1, 8), (ALL * SLOT_BYTES, ALL), (1 << 50, ALL)],
)
def test_a_budget_gives_whole_slots_and_at_most_one_for_each_expert(cache_bytes, slots):
    assert slots_for(cache_bytes, MODEL) == slots


@pytest.mark.parametrize("cache_bytes", [1, 8 * SLOT_BYTES - 1])
def test_too_small_a_budget_is_refused_with_the_one_that_would_do(cache_bytes):
    with pytest.raises(CapacityError, match=f"set cache.bytes to at least {8 * SLOT_BYTES:,}"):
        slots_for(cache_bytes, MODEL)


@pytest.mark.parametrize(("slots", "reserve"), [(8, 0), (32, 2), (95, 1), (96, 0), (ALL, 0)])
def test_a_reserve_is_kept_only_while_experts_of_the_backbone_are_left_outside(slots, reserve):
    assert MODEL.num_hidden_layers * MODEL.n_routed_experts == 96
    assert reserve_for(slots, MODEL) == reserve


@pytest.fixture
def pool():
    pool = Pool(21, MODEL, "cpu")
    yield pool
    pool.close()


def test_a_worker_finds_every_slot_where_it_is_told(pool):
    landing = make_landing(pool.slab, pool.slot_bytes)
    for number in range(21):
        with landing.into(number) as slot:
            slot.put(0, np.full(SLOT_BYTES, number, np.uint8))
    opened = pool.opened("boot")
    slab = HostSlab.open(opened.slab_handle)
    slots = slab.view().reshape(opened.num_slots, opened.slot_bytes)
    assert (slots == np.arange(21)[:, None]).all()
    assert (opened.boot_id, opened.wave_experts) == ("boot", 10)
    landing.close()
    slab.close()


def test_slots_are_page_aligned_as_o_direct_wants_them(pool):
    landing = make_landing(pool.slab, pool.slot_bytes)
    for number in range(21):
        with landing.into(number) as slot:
            assert slot.memory(0, SLOT_BYTES).ctypes.data % 4096 == 0
            assert slot.memory(4096, SLOT_BYTES) is None


def test_what_is_published_is_in_the_workers_table(pool):
    block = ControlBlock.open(pool.opened("boot").control_handle)
    pool.publish(Key(6, 15), 20)
    assert np.argwhere(block.slot_table >= 0).tolist() == [[6, 15]]
    assert block.slot_table[6, 15] == 20
    pool.withdraw(Key(6, 15))
    assert (block.slot_table == -1).all()
    block.close()
