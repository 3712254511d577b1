"""The pool in shared memory: how many slots, where each one is, and what a worker is told."""

import numpy as np
import pytest
from helpers.services import ROOT

from services.expertd import pool as pool_module
from services.expertd.policy import Key
from services.expertd.pool import Pool, slots_for
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout
from shared.errors import CapacityError
from shared.memory.control_block import ControlBlock
from shared.memory.slab import open_slab

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


@pytest.fixture
def pool(monkeypatch):
    """21 slots in slabs of 8, 8 and 5."""
    monkeypatch.setattr(pool_module, "LARGEST_SLAB_BYTES", 9 * SLOT_BYTES - 1)
    pool = Pool(21, MODEL, "cpu")
    yield pool
    pool.close()


def test_a_worker_finds_every_slot_where_it_is_told(pool):
    for number in range(21):
        pool.slot(number)[:] = number
    opened = pool.opened("boot")
    slabs = [open_slab(handle) for handle in opened.slab_handles]
    assert [slab.nbytes for slab in slabs] == [8 * SLOT_BYTES, 8 * SLOT_BYTES, 5 * SLOT_BYTES]
    for number in range(opened.num_slots):
        begin = number % opened.slots_per_slab * opened.slot_bytes
        memory = slabs[number // opened.slots_per_slab].view()[begin : begin + opened.slot_bytes]
        assert (memory == number).all()
    assert (opened.boot_id, opened.wave_experts) == ("boot", 10)
    for slab in slabs:
        slab.close()


def test_slots_are_page_aligned_as_o_direct_wants_them(pool):
    assert all(pool.slot(number).ctypes.data % 4096 == 0 for number in range(21))


def test_what_is_published_is_in_the_workers_table(pool):
    block = ControlBlock.open(pool.opened("boot").control_handle)
    pool.publish(Key(6, 15), 20)
    assert np.argwhere(block.slot_table >= 0).tolist() == [[6, 15]]
    assert block.slot_table[6, 15] == 20
    pool.withdraw(Key(6, 15))
    assert (block.slot_table == -1).all()
    block.close()


def test_a_device_without_slabs_is_refused():
    with pytest.raises(CapacityError, match="no slabs in cuda memory"):
        Pool(8, MODEL, "cuda")
