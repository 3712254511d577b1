"""Eviction orders against their definitions."""

import random

import pytest

from services.expertd.policy import POLICIES, AgedLfu, Key, Lfu, Lru


def keys(n: int) -> list[Key]:
    return [Key(0, e) for e in range(n)]


def test_lru_gives_up_the_longest_unused():
    policy, (a, b, c) = Lru(), keys(3)
    for key in (a, b, c):
        policy.insert(key)
    policy.touch(a)
    assert list(policy.order()) == [b, c, a]


def test_lfu_gives_up_the_least_used_and_among_equals_the_oldest():
    policy, (a, b, c, d) = Lfu(), keys(4)
    for key in (a, b, c, d):
        policy.insert(key)
    for key in (a, a, c):
        policy.touch(key)
    assert list(policy.order()) == [b, d, c, a]
    policy.remove(b)
    assert list(policy.order()) == [d, c, a]
    assert policy.uses() == {a: 3, c: 2, d: 1}


@pytest.mark.parametrize("seed", range(20))
def test_lfu_agrees_with_a_sorted_list(seed):
    """The linked buckets against the plain definition, under random operations."""
    rng, policy = random.Random(seed), Lfu()
    plain: dict[Key, tuple[int, int]] = {}  # uses, and when they got there
    for time in range(500):
        key = Key(rng.randrange(3), rng.randrange(8))
        if key not in plain:
            uses = rng.randint(0, 5)
            policy.insert(key, uses)
            plain[key] = (uses, time)
        elif rng.random() < 0.2:
            policy.remove(key)
            del plain[key]
        else:
            policy.touch(key)
            plain[key] = (plain[key][0] + 1, time)
        assert list(policy.order()) == sorted(plain, key=lambda k: plain[k])


def simulate(name: str, capacity: int, trace: list[Key]) -> int:
    """Misses of a trace."""
    policy, resident, misses = POLICIES[name](), set(), 0
    for key in trace:
        if key in resident:
            policy.touch(key)
            continue
        misses += 1
        if len(resident) == capacity:
            victim = next(iter(policy.order()))
            policy.remove(victim)
            resident.remove(victim)
        policy.insert(key)
        resident.add(key)
    return misses


def topics(rng: random.Random, first: range, second: range, rounds: int) -> list[Key]:
    def uses(topic: range) -> list[Key]:
        return [Key(0, rng.choice(topic)) for _ in range(rounds)]

    return uses(first) + uses(second)


def test_ageing_survives_a_change_of_topic_that_plain_lfu_does_not():
    trace = topics(random.Random(1), range(40), range(40, 80), 4000)
    plain, aged = simulate("lfu", 50, trace), simulate("lfu-aged", 50, trace)
    assert aged < plain / 2


def test_ageing_keeps_the_favourites_that_lru_loses_to_a_scan():
    rng = random.Random(2)
    favourites = [Key(0, rng.choice(range(20))) for _ in range(2000)]
    scan = [Key(1, e) for e in range(200)]
    trace = favourites + [key for pair in zip(scan, favourites, strict=False) for key in pair] + favourites
    assert simulate("lfu-aged", 30, trace) <= simulate("lru", 30, trace)


def test_new_keys_are_safe_until_newer_ones_come():
    policy = AgedLfu()
    old = keys(16)
    for key in old:
        policy.insert(key)
        policy.touch(key)
    new = Key(1, 0)
    policy.insert(new)
    assert next(iter(policy.order())) != new
    assert set(policy.order()) == {*old, new}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_order_holds_every_key_once(name):
    rng, policy, present = random.Random(3), POLICIES[name](), set()
    for _ in range(3000):
        key = Key(rng.randrange(4), rng.randrange(16))
        if key not in present:
            policy.insert(key)
            present.add(key)
        elif rng.random() < 0.3:
            policy.remove(key)
            present.remove(key)
        else:
            policy.touch(key)
        order = list(policy.order())
        assert len(order) == len(present)
        assert set(order) == present == set(policy.uses())
