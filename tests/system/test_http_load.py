"""A smaller helping of benchmarks/front_load: clients at once on the running demo, and clients that vanish."""

import asyncio

import pytest
from helpers.front import demo_front, url_of

from benchmarks.front_load import Watch, ask, ask_together, question, vanish

pytestmark = pytest.mark.system

# Threads, caches of the allocator and the like: what a process may grow by, once.
GROWTH_MIB = 16
GROWTH_DESCRIPTORS = 8


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with demo_front(tmp_path_factory.mktemp("load")) as services:
        yield services


@pytest.fixture(scope="module")
def alone(stack):
    """What the first two questions are answered, one after the other."""
    return [asyncio.run(ask(url_of(stack), question(i))).text for i in range(2)]


def test_each_client_gets_its_own_answer(stack):
    watch = Watch(stack)
    before = watch.settled()
    alone, together = asyncio.run(ask_together(url_of(stack), 6))
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert {answer.finish_reason for answer in together} == {"stop"}
    assert len({answer.text for answer in together}) == 6
    bounded(before, watch.settled())


def test_nothing_of_vanished_clients_stays(stack, alone):
    """And the next request is served at once: it does not wait for answers that nobody takes."""
    watch = Watch(stack)
    before = watch.settled()
    asyncio.run(vanish(url_of(stack), 40, seed=3))
    after = asyncio.run(ask(url_of(stack), question(1)))
    assert after.text == alone[1]
    bounded(before, watch.settled())
    assert "Traceback" not in stack.log("front")


def bounded(before, after):
    assert after["mib"] - before["mib"] < GROWTH_MIB
    assert after["descriptors"] - before["descriptors"] < GROWTH_DESCRIPTORS
