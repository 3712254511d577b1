"""The cache's bookkeeping: bytes to the last one, hits and misses, what is kept."""

import random

import pytest

from services.expertd.cache import ExpertCache
from services.expertd.policy import POLICIES, Key, Lfu


def test_get_counts_hits_and_misses():
    cache = ExpertCache(100, Lfu())
    assert cache.hit_rate == 0.0
    assert cache.get(Key(0, 1)) is None
    cache.put(Key(0, 1), slot=7, nbytes=60)
    assert cache.get(Key(0, 1)) == 7
    cache.use(Key(0, 1), 2)
    assert cache.hit_rate == pytest.approx(3 / 4)


def test_evict_gives_up_at_least_the_bytes_in_the_order_of_use():
    cache = ExpertCache(100, Lfu())
    for expert, nbytes in enumerate((30, 30, 40)):
        cache.put(Key(0, expert), expert, nbytes)
    cache.get(Key(0, 0))
    assert cache.evict(31) == [(Key(0, 1), 1), (Key(0, 2), 2)]
    assert (cache.size, len(cache)) == (30, 1)
    assert cache.evict(0) == []


def test_evict_passes_over_what_is_kept():
    cache = ExpertCache(100, Lfu())
    for expert in range(3):
        cache.put(Key(0, expert), expert + 10, 20)
    assert cache.evict(20, lambda key, slot: key.expert == 0 or slot == 11) == [(Key(0, 2), 12)]
    assert cache.evict(99, lambda key, slot: True) == []


def test_a_full_cache_and_a_double_entry_are_bugs_of_the_caller():
    cache = ExpertCache(50, Lfu())
    cache.put(Key(0, 0), 0, 50)
    with pytest.raises(AssertionError, match="no room"):
        cache.put(Key(0, 1), 1, 1)
    with pytest.raises(AssertionError, match="already"):
        cache.put(Key(0, 0), 1, 0)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_size_is_exact_under_random_use(name):
    rng, cache = random.Random(name), ExpertCache(1000, POLICIES[name]())
    sizes: dict[Key, int] = {}
    for _ in range(2000):
        key, nbytes = Key(rng.randrange(3), rng.randrange(20)), rng.randint(1, 200)
        if cache.get(key) is None:
            for gone, _ in cache.evict(max(0, cache.size + nbytes - cache.capacity)):
                del sizes[gone]
            cache.put(key, 0, nbytes)
            sizes[key] = nbytes
        assert cache.size == sum(sizes.values()) <= cache.capacity
        assert len(cache) == len(sizes)
