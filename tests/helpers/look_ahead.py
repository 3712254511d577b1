"""An answer of the trained demo on a small cache, with and without guesses, and what the services counted."""

from __future__ import annotations

import time
from pathlib import Path

from helpers.services import ROOT, Stack, generate, running, token_ids, worker_client, write_config
from shared.protocol.messages import Generate
from shared.stats import StatsSubscriber

DEMO = ROOT / "demo" / "checkpoint"
REQUEST = Generate(tuple(range(300, 320)), 60, temperature=0.8, seed=5)


def with_and_without(path: Path, least: int, **worker: object) -> tuple[dict[str, float], dict[str, float]]:
    """What is counted with guesses and without; they are good ones, at least so many, only made if the config says so,
    and change no word. `worker` overrides its section."""
    ids, with_guesses = _decode(path / "with", look_ahead=True, **worker)
    same, without = _decode(path / "without", look_ahead=False, **worker)
    assert ids == same
    assert (without["guessed"], without["guessed_right"]) == (0, 0)
    assert with_guesses["guessed"] >= least
    assert with_guesses["guessed_right"] > 0.4 * with_guesses["guessed"]
    assert with_guesses["hint_messages"] > without["hint_messages"] > 0
    return with_guesses, without


def _decode(path: Path, look_ahead: bool, **worker: object) -> tuple[list[int], dict[str, float]]:
    """The ids of an answer on a cache of 40 % of the experts, and the counters."""
    path.mkdir()
    cache = {"bytes": "4 MiB", "save_heat": False}
    prefetch = {"look_ahead": look_ahead}
    config = write_config(path / "icebox.toml", DEMO, cache=cache, prefetch=prefetch, worker=worker)
    with running(config, "expertd", "worker") as stack, worker_client(stack.config) as client:
        ids = token_ids(generate(client, REQUEST))
        return ids, _counts(stack)


def _counts(stack: Stack) -> dict[str, float]:
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
