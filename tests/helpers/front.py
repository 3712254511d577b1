"""The running demo behind its HTTP address, and what its front counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.services import ROOT, Stack, running, write_config
from shared.stats import StatsSubscriber

SECTIONS: dict[str, dict[str, object]] = {
    "model": {"max_context": 1024},
    "cache": {"bytes": "8 MiB"},
    "front": {"http_port": 0},
}


@contextmanager
def demo_front(folder: Path) -> Iterator[Stack]:
    """All three services on the demo checkpoint, HTTP on a free port."""
    with running(write_config(folder / "icebox.toml", ROOT / "demo" / "checkpoint", **SECTIONS)) as stack:
        yield stack


def url_of(stack: Stack) -> str:
    return (stack.config.run_dir / "front.http").read_text(encoding="utf-8").strip()


def front_stats(stack: Stack) -> dict[str, float]:
    return published(stack, "front")


def published(stack: Stack, service: str) -> dict[str, float]:
    """Counters in a snapshot taken after this call."""
    subscriber = StatsSubscriber([stack.config.endpoint(f"{service}.stats")])
    asked = time.time()
    try:
        while (snapshot := subscriber.poll(5.0)) is not None:
            if snapshot.time_s > asked:
                return snapshot.values
        raise AssertionError("no statistics")
    finally:
        subscriber.close()
