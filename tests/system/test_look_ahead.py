"""Guesses of the trained demo's routers spare it misses, and are made only if the config says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.services import ROOT, Stack, generate, running, token_ids, worker_client, write_config

from shared.protocol.messages import Generate
from shared.stats import StatsSubscriber

pytestmark = pytest.mark.system

DEMO = ROOT / "demo" / "checkpoint"
REQUEST = Generate(tuple(range(300, 320)), 60, temperature=0.8, seed=5)


def decode(path: Path, look_ahead: bool) -> tuple[list[int], dict[str, float]]:
    """The ids of an answer on a cache of 40 % of the experts, and what the services counted."""
    path.mkdir()
    cache = {"bytes": "4 MiB", "save_heat": False}
    config = write_config(path / "icebox.toml", DEMO, cache=cache, prefetch={"look_ahead": look_ahead})
    with running(config, "expertd", "worker") as stack, worker_client(stack.config) as client:
        ids = token_ids(generate(client, REQUEST))
        return ids, counts(stack)


def counts(stack: Stack) -> dict[str, float]:
    """Values of both services that were published after this call, once the worker has counted the request."""
    subscriber = StatsSubscriber([stack.config.endpoint(f"{name}.stats") for name in ("expertd", "worker")])
    asked, deadline = time.time(), time.monotonic() + 10
    values: dict[str, float] = {}
    try:
        while values.get("requests_done") != 1 or "misses" not in values:
            assert time.monotonic() < deadline, values
            snapshot = subscriber.poll(1.0)
            if snapshot is not None and snapshot.time_s > asked:
                values |= snapshot.values
    finally:
        subscriber.close()
    return values


def test_guesses_spare_misses_and_change_no_word(tmp_path: Path) -> None:
    ids, with_guesses = decode(tmp_path / "with", look_ahead=True)
    same, without = decode(tmp_path / "without", look_ahead=False)
    assert ids == same
    assert (without["guessed"], without["guessed_right"]) == (0, 0)
    assert with_guesses["guessed"] > 100
    assert with_guesses["guessed_right"] > 0.4 * with_guesses["guessed"]
    assert with_guesses["misses"] < 0.8 * without["misses"]
