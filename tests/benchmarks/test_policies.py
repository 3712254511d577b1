"""The replay of routes: bounds, bookkeeping, and what the recorded trace says of the demo's own cache."""

from __future__ import annotations

import random

import pytest

from benchmarks.policies import HASH_LAYERS, MAKERS, PREFETCHES, TRACE, LookUp, hit_rate, look_ups
from services.expertd.policy import POLICIES, Key

ON_DEMAND = PREFETCHES["on demand"]
# What configs/demo.toml's cache holds: 4 MiB, 40 % of the checkpoint's 192 experts.
DEMO_SLOTS = 78


def single_uses(seed: int, num: int = 400) -> list[LookUp]:
    """Skewed, and drifting: the favourites change half way."""
    rng = random.Random(seed)
    return [LookUp((Key(0, min(int(rng.expovariate(0.25)), 15) + 8 * (2 * i // num)),)) for i in range(num)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [2, 5, 9])
def test_nobody_beats_belady_on_demand(seed, capacity):
    steps = single_uses(seed)
    rates = {name: hit_rate(steps, make(steps), capacity, ON_DEMAND) for name, make in MAKERS.items()}
    assert rates["belady"] == max(rates.values())
    assert min(rates.values()) > 0


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_policy_gives_up_what_it_holds_and_never_what_is_kept(name):
    rng = random.Random(name)
    steps = [LookUp((Key(0, rng.randrange(30)),)) for _ in range(2000)]
    evictor, held = MAKERS[name](steps), set[Key]()
    for step in steps:
        (key,) = step.keys
        if key in held:
            evictor.touch(key)
            continue
        if len(held) == 12:
            kept = {key, *rng.sample(sorted(held), 11)} if rng.random() < 0.2 else {key}
            victim = evictor.evict(kept)
            assert victim not in kept
            held.remove(victim)
        evictor.insert(key, 1)
        held.add(key)


def test_what_is_prefetched_is_found():
    a, b, c = (Key(layer, 0) for layer in range(3))
    steps = [LookUp((a,), hinted=(b,)), LookUp((b,), guessed=(c,)), LookUp((c,))]
    rates = [hit_rate(steps, MAKERS["lru"](steps), 8, prefetch) for prefetch in PREFETCHES.values()]
    assert rates == pytest.approx([0, 1 / 3, 2 / 3])


def test_the_trace_becomes_look_ups_with_their_prefetches():
    steps = look_ups(TRACE)
    layers = 7
    assert [step.keys[0].layer for step in steps] == [i % layers for i in range(len(steps))]
    assert len(steps[0].keys) > 4, "a prompt is taken in as a whole"
    decoded = [steps[i : i + layers] for i in range(0, len(steps), layers) if len(steps[i].keys) == 4]
    assert len(decoded) > 500
    for step in decoded:
        assert set(step[0].hinted) == {key for later in step[1:HASH_LAYERS] for key in later.keys}
        assert [bool(look_up.guessed) for look_up in step] == [
            i + 1 in range(HASH_LAYERS, layers) for i in range(layers)
        ]


def test_the_demo_s_cache_is_hit_more_than_60_percent_by_its_own_policy():
    steps = look_ups(TRACE)
    both = PREFETCHES["hash layers and guesses"]
    rates = {name: hit_rate(steps, MAKERS[name](steps), DEMO_SLOTS, both) for name in POLICIES}
    assert max(rates, key=rates.__getitem__) == "lfu-aged"
    assert 0.6 < rates["lfu-aged"] < 0.98
