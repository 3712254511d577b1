"""The control block: one layout for both sides, one cache line for each writer."""

import ctypes
import struct

import numpy as np
import pytest

from shared.errors import ProtocolError
from shared.memory.control_block import NO_SLOT, TICKET_WORDS, TICKETS, Addresses, ControlBlock
from shared.memory.host import HostSlab

LAYERS, EXPERTS = 3, 5
LINE = 64


@pytest.fixture
def pair():
    """Two mappings of one block, as expertd and the worker have them."""
    ours = ControlBlock.create(LAYERS, EXPERTS)
    theirs = ControlBlock.open(ours.handle())
    yield ours, theirs
    theirs.close()
    ours.close()


def test_a_new_block_is_empty_and_idle(pair):
    for block in pair:
        assert (block.slot_table == NO_SLOT).all()
        assert not block.uses.any()
        assert (block.worker_clock, block.busy, block.abort, block.ticket_head) == (0, False, False, 0)
        assert not block.tickets.any()


def test_types_and_shapes(pair):
    for block in pair:
        assert (block.slot_table.dtype, block.slot_table.shape) == (np.int32, (LAYERS, EXPERTS))
        assert (block.uses.dtype, block.uses.shape) == (np.uint64, (LAYERS, EXPERTS))
        assert (block.tickets.dtype, block.tickets.shape) == (np.int32, (TICKETS, TICKET_WORDS))


def test_each_side_sees_what_the_other_writes(pair):
    ours, theirs = pair
    ours.slot_table[1, 2] = 77
    theirs.uses[2, 4] += 3
    theirs.worker_clock = 2**64 - 1
    theirs.busy = True
    theirs.abort = True
    assert theirs.slot_table[1, 2] == 77
    assert ours.uses[2, 4] == 3
    assert (ours.worker_clock, ours.busy, ours.abort) == (2**64 - 1, True, True)
    assert (ours.slot_table == NO_SLOT).sum() == LAYERS * EXPERTS - 1


def changed_bytes(block: ControlBlock, write) -> set[int]:
    """Which bytes of the block a write touches."""
    slab = HostSlab.open(block.handle())
    before = slab.view().copy()
    write()
    changed = set(np.flatnonzero(slab.view() != before).tolist())
    slab.close()
    return changed


def test_every_writer_has_cache_lines_of_its_own(pair):
    ours, theirs = pair
    fields = {
        "clock": changed_bytes(ours, lambda: setattr(theirs, "worker_clock", 2**64 - 1)),
        "busy": changed_bytes(ours, lambda: setattr(theirs, "busy", True)),
        "abort": changed_bytes(ours, lambda: setattr(theirs, "abort", True)),
        "table": changed_bytes(ours, lambda: ours.slot_table.fill(0x01010101)),
        "uses": changed_bytes(ours, lambda: theirs.uses.fill(2**64 - 1)),
        "head": changed_bytes(ours, lambda: setattr(theirs, "ticket_head", 2**64 - 1)),
        "tickets": changed_bytes(ours, lambda: theirs.tickets.fill(0x01010101)),
    }
    cells = LAYERS * EXPERTS
    assert [len(b) for b in fields.values()] == [8, 1, 1, 4 * cells, 8 * cells, 8, 4 * TICKETS * TICKET_WORDS]
    lines = [{b // LINE for b in touched} for touched in fields.values()]
    assert sum(map(len, lines)) == len(set().union(*lines)), "two fields share a cache line"


FIELDS = {
    "worker_clock": ("Q", lambda block, value: setattr(block, "worker_clock", value)),
    "abort": ("I", lambda block, value: setattr(block, "abort", bool(value))),
    "ticket_head": ("Q", lambda block, value: setattr(block, "ticket_head", value)),
    "slot_table": ("i", lambda block, value: block.slot_table.fill(value)),
    "uses": ("Q", lambda block, value: block.uses.fill(value)),
    "tickets": ("i", lambda block, value: block.tickets.fill(value)),
}


@pytest.mark.parametrize("name", Addresses._fields)
def test_kernels_find_every_field_where_it_is_said_to_be(pair, name):
    """Read through the pointer, as a GPU does whose mapping begins elsewhere."""
    ours, theirs = pair
    kind, write = FIELDS[name]
    write(ours, 1)
    address = getattr(theirs.addresses(theirs.address), name)
    assert struct.unpack(kind, ctypes.string_at(address, struct.calcsize(kind))) == (1,)
    assert getattr(theirs.addresses(0), name) == address - theirs.address


@pytest.mark.parametrize(("word", "value"), [(0, 0), (0, 0x58424348), (1, 1)])
def test_other_memory_is_refused(pair, word, value):
    slab = HostSlab.open(pair[0].handle())
    slab.view()[:16].view(np.uint32)[word] = value
    with pytest.raises(ProtocolError, match="no control block of version 2"):
        ControlBlock.open(slab.handle())
    slab.close()


@pytest.mark.parametrize("shape", [(3, 6), (2**31, 2**31), (0, 5)])
def test_a_block_that_says_another_shape_than_it_has_is_refused(pair, shape):
    slab = HostSlab.open(pair[0].handle())
    slab.view()[8:16].view(np.uint32)[:] = shape
    with pytest.raises(ProtocolError, match="no control block"):
        ControlBlock.open(slab.handle())
    slab.close()


def test_memory_too_small_for_a_header_is_refused():
    slab = HostSlab.create(8)
    with pytest.raises(ProtocolError, match="no control block"):
        ControlBlock.open(slab.handle())
    slab.close()


def test_closing_twice_is_harmless(pair):
    pair[1].close()
    pair[1].close()
    pair[0].slot_table[0, 0] = 1
