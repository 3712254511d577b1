import numpy as np
import pytest

from services.expertd.picture import HALF_LIFE, HOTTEST, Picture
from shared.memory.control_block import NO_SLOT


class Cache:
    """A table and counts of 2 layers x 3 experts, and the pictures taken of them, uint8 [2, 3]."""

    def __init__(self):
        self.table = np.full((2, 3), NO_SLOT, np.int32)
        self.uses = np.zeros((2, 3), np.uint64)
        self.picture = Picture(2, 3)

    def levels(self):
        taken = np.frombuffer(self.picture.take(self.table, self.uses), np.uint8).reshape(2, 3)
        return (taken & 127).tolist(), (taken >> 7).tolist()


@pytest.fixture
def cache():
    return Cache()


def test_residency(cache):
    assert cache.levels() == ([[0] * 3] * 2, [[0] * 3] * 2)
    cache.table[1, 2], cache.table[0, 0] = 0, 9
    assert cache.levels()[1] == [[1, 0, 0], [0, 0, 1]]
    cache.table[0, 0] = NO_SLOT
    assert cache.levels()[1] == [[0, 0, 0], [0, 0, 1]]


def test_heat_is_compared_with_the_hottest(cache):
    cache.uses[0] = 1, 4, 16
    assert cache.levels()[0] == [[round(HOTTEST / 4), round(HOTTEST / 2), HOTTEST], [0, 0, 0]]
    cache.uses[1, 1] = 10**15
    assert cache.levels()[0] == [[0, 0, 0], [0, HOTTEST, 0]]


def test_heat_stays_while_nothing_is_used_and_halves_with_use(cache):
    cache.uses[0, 0] = 2 * HALF_LIFE * 6
    before = cache.levels()
    assert cache.levels() == before
    cache.uses[1, 1] += HALF_LIFE * 6
    assert cache.levels()[0] == [[HOTTEST, 0, 0], [0, HOTTEST, 0]]


def test_the_table_and_the_counts_are_left_alone(cache):
    cache.uses[0, 1] = 4
    cache.levels()
    assert cache.uses.tolist() == [[0, 4, 0], [0, 0, 0]]
