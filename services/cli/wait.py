"""`icebox wait`: until every service is ready, or it is plain that one never will be.

What to make of the answers is pure (`Watch`, which is told the time); only `wait` asks and sleeps.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Annotated

import typer

from services.cli.options import SERVICES, ConfigOption, chosen_config
from services.cli.progress import describe, loading_bars
from shared.config import Config
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Pong
from shared.runtime.state import ServiceState
from shared.transport.control import ping

INTERVAL_S = 0.1
PING_S = 1.0
# Services that are there answer sooner.
PATIENCE_S = 1.0
# Services under honcho end together: if none of them answers for this long, none is coming.
SILENCE_S = 20.0


def wait(
    config: ConfigOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; loading a large model takes minutes.")] = 600.0,
) -> None:
    """Wait until all services are ready, and say what they do meanwhile."""
    settings = chosen_config(config)
    watch = Watch(settings, time.monotonic(), timeout)
    with loading_bars() as show:
        while not watch.all_ready:
            pongs = {name: ping(settings, name, PING_S) for name in SERVICES}
            changed = watch.look(pongs, time.monotonic())
            show([pong for pong in pongs.values() if pong], changed)
            if watch.is_alone(time.monotonic()):
                print(f"waiting for the services in {settings.run_dir}", file=sys.stderr)
            if not watch.all_ready:
                time.sleep(INTERVAL_S)


@dataclass(slots=True)
class Watch:
    """What is known of the services so far."""

    config: Config
    started: float
    timeout_s: float
    seen: dict[str, Pong] = field(default_factory=dict)
    all_ready: bool = False
    last_answer: float = 0.0
    _is_told: bool = False

    def look(self, pongs: dict[str, Pong | None], now: float) -> list[Pong]:
        """Take in one round of answers; those whose state or doing changed.

        Raises:
            PeerLost: a service has ended, or none answers.
            ServiceError: `timeout`.
        """
        changed = []
        for name, pong in pongs.items():
            before = self.seen.get(name)
            self._check(name, pong, before)
            if pong is not None:
                self.seen[name], self.last_answer = pong, now
                if before is None or (pong.state, pong.detail) != (before.state, before.detail):
                    changed.append(pong)
        self.all_ready = all(pong is not None and pong.state == ServiceState.READY for pong in pongs.values())
        if not self.all_ready:
            self._check_time(pongs, now)
        return changed

    def is_alone(self, now: float) -> bool:
        """Whether to say that no service has answered so far; True once."""
        if self._is_told or self.seen or now - self.started < PATIENCE_S:
            return False
        self._is_told = True
        return True

    def _check(self, name: str, pong: Pong | None, before: Pong | None) -> None:
        if pong is None and before is not None:
            raise PeerLost(f"{name} has ended (it was {describe(before)}); its log says why")
        if pong is not None and pong.state == ServiceState.DRAINING:
            raise PeerLost(f"{name} is stopping; its log says why")

    def _check_time(self, pongs: dict[str, Pong | None], now: float) -> None:
        if now - max(self.last_answer, self.started) > min(SILENCE_S, self.timeout_s):
            raise PeerLost(
                f"no service answers in {self.config.run_dir}; start them with `icebox up` or `honcho start`, "
                f"with the same config ({self.config.source})"
            )
        if now - self.started > self.timeout_s:
            waiting = [name if pong is None else describe(pong) for name, pong in pongs.items() if not _is_ready(pong)]
            text = f"not ready within {self.timeout_s:g} s: {'; '.join(waiting)} (--timeout sets the limit)"
            raise ServiceError(ErrorCode.TIMEOUT, text)


def _is_ready(pong: Pong | None) -> bool:
    return pong is not None and pong.state == ServiceState.READY
