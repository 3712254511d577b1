"""expertd and worker as children of a benchmark, on a config derived from a deployment's, and one client of the worker.

Owns processes and sockets; knows nothing of what the counters mean. However the benchmark ends, its children end too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from services.cli.progress import loading_bars
from services.cli.wait import INTERVAL_S, PING_S, Watch
from shared.config import AUTO_BYTES, Config, load_config
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import ErrorReply, Generate, StatsSnapshot, TokensGenerated
from shared.runtime.boot import make_identity
from shared.stats import StatsSubscriber
from shared.transport.client import BlockingClient, service_error
from shared.transport.control import ping

SERVICES = ("expertd", "worker")
ROOT = Path(__file__).resolve().parents[2]
# Without a token for this long, something hangs: the slowest disk reads a step's experts in less.
TOKEN_TIMEOUT_S = 300.0
STATS_TIMEOUT_S = 10.0
# expertd reads the worker's use counts every 20 ms.
SETTLE_S = 0.05
STOP_S = 10.0
LOG_LINES = 12
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)  # looked up here: between fork and exec the loader's locks may be held for ever


def derived(config: Config, run_dir: Path, cache_bytes: int) -> Config:
    """The same deployment in `run_dir`, with a pool of `cache_bytes`, and nothing kept of earlier runs or requests."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=run_dir),
        cache=dataclasses.replace(config.cache, bytes=cache_bytes, save_heat=False),
        worker=dataclasses.replace(config.worker, session_bytes=0, session_dir=None),
    )


def to_toml(config: Config) -> str:
    """A file from which `load_config` reads this config again, but for its `source`."""
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "source"}
    return "\n".join(_section(name, section) for name, section in sections.items())


def _section(name: str, section: Any) -> str:
    values = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
    if name == "cache" and values["bytes"] == AUTO_BYTES:
        values["bytes"] = "auto"
    return f"[{name}]\n" + "".join(f"{key} = {_value(v)}\n" for key, v in values.items() if v is not None)


def _value(value: object) -> str:
    """JSON's numbers, truth values and strings are TOML's as well."""
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


@contextmanager
def running(config: Config, cache_bytes: int, timeout_s: float) -> Iterator[Bench]:
    """Both services READY inside the block, stopped after it.

    Raises:
        PeerLost: a service ended before it was ready; the message holds the end of its log.
        ServiceError: `timeout`.
    """
    with tempfile.TemporaryDirectory(prefix="icebox-bench-") as name:
        directory = Path(name)
        path = directory / "icebox.toml"
        path.write_text(to_toml(derived(config, directory / "run", cache_bytes)), encoding="utf-8")
        processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for service in SERVICES:
                processes[service] = _start(service, path)
            own = load_config(path)
            _wait_ready(own, processes, timeout_s)
            with closing(Bench(own)) as bench:
                bench.connect()
                yield bench
        finally:
            _stop(processes.values())


def _start(service: str, config: Path) -> subprocess.Popen[bytes]:
    with _log_path(config.parent, service).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"services.{service}", "--config", str(config)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """Runs in the child: SIGTERM when the benchmark dies, even of a SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(config: Config, processes: Mapping[str, subprocess.Popen[bytes]], timeout_s: float) -> None:
    watch = Watch(config, time.monotonic(), timeout_s)
    with loading_bars() as show:
        while not watch.all_ready:
            for name, process in processes.items():
                if process.poll() is not None:
                    end = _log_end(config.source.parent, name)
                    raise PeerLost(f"{name} ended with exit code {process.returncode} before it was ready:\n{end}")
            # Its process lives: one that does not answer is busy, with a compiler perhaps, and what it was before.
            pongs = {name: ping(config, name, PING_S) or watch.seen.get(name) for name in SERVICES}
            changed = watch.look(pongs, time.monotonic())
            show([pong for pong in pongs.values() if pong], changed)
            if not watch.all_ready:
                time.sleep(INTERVAL_S)


def _log_path(directory: Path, service: str) -> Path:
    return directory / f"{service}.log"


def _log_end(directory: Path, service: str) -> str:
    text = _log_path(directory, service).read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-LOG_LINES:])


def _stop(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all at once; SIGKILL to those that do not go."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Bench:
    """A client of both services: one request at a time, and their counters between two. Used by one thread."""

    def __init__(self, config: Config) -> None:
        self._requests = 0
        self._client = BlockingClient(config.endpoint("worker"), make_identity("bench"))
        self._stats = StatsSubscriber([config.endpoint(f"{name}.stats") for name in SERVICES])

    def connect(self) -> None:
        """Raises PeerLost if the worker is gone."""
        self._client.connect(STATS_TIMEOUT_S)

    def generate(self, message: Generate) -> tuple[list[int], list[float]]:
        """The tokens of one request and when each arrived, in seconds of `time.perf_counter`.

        Raises:
            ServiceError: the worker refused or failed, or `timeout`.
            PeerLost: the worker went away.
        """
        self._client.start(message)
        self._requests += 1
        ids: list[int] = []
        times: list[float] = []
        while True:
            event = self._client.poll(TOKEN_TIMEOUT_S)
            now = time.perf_counter()
            if event is None:
                text = f"no token within {TOKEN_TIMEOUT_S:g} s, after {len(ids)}"
                raise ServiceError(ErrorCode.TIMEOUT, text)
            reply = event[1]
            if isinstance(reply, ErrorReply):
                raise service_error(reply)
            assert isinstance(reply, TokensGenerated)
            ids += reply.token_ids
            times += [now] * len(reply.token_ids)
            if reply.finish_reason:
                return ids, times

    def counters(self) -> dict[str, float]:
        """Both services' values once every request so far is counted. Raises ServiceError (timeout)."""
        deadline = time.monotonic() + STATS_TIMEOUT_S
        worker = expertd = None
        counted_at = time.time()
        while worker is None or expertd is None:
            snapshot = self._stats.poll(deadline - time.monotonic())
            if snapshot is None:
                raise ServiceError(ErrorCode.TIMEOUT, f"no statistics within {STATS_TIMEOUT_S:g} s")
            if snapshot.time_s < counted_at:
                continue
            if snapshot.service == "worker" and self._is_complete(snapshot):
                worker = worker or snapshot
                counted_at = worker.time_s + SETTLE_S
            elif snapshot.service == "expertd" and worker is not None:
                expertd = snapshot
        return {**expertd.values, **worker.values}

    def _is_complete(self, snapshot: StatsSnapshot) -> bool:
        return snapshot.values.get("requests_done", 0) >= self._requests

    def close(self) -> None:
        self._client.close()
        self._stats.close()
