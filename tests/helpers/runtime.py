"""A tiny service in a process of its own, whose behaviour is chosen by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.config import Config, load_config
from shared.errors import CapacityError, CheckpointError, ConfigError, ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Pong
from shared.runtime.context import ServiceContext
from shared.runtime.service import run_service
from shared.transport.control import ping

ROOT = Path(__file__).resolve().parents[2]

ERRORS: dict[str, Exception] = {
    "config": ConfigError("c.toml: 'cache.bytes' must be larger"),
    "checkpoint": CheckpointError("model-00001.safetensors is truncated"),
    "capacity": CapacityError("the cache needs 24 slots"),
    "peer-lost": PeerLost("expertd went away"),
    "service": ServiceError(ErrorCode.IO_ERROR, "the disk is on fire"),
    "bug": ZeroDivisionError("a bug"),
    "exit": SystemExit("from somewhere"),  # type: ignore[dict-item]
}


def behave(context: ServiceContext, what: str) -> None:
    """What the service does once it runs."""
    if what in ERRORS:
        raise ERRORS[what]
    if what == "return":
        return
    if what == "load":
        context.progress("shard 3 of 48")
        context.wait()
        return
    context.on_stop(lambda: _on_stop(0.3 if what == "slow-callback" else 0.0))
    if what == "crash-thread":
        threading.Thread(target=lambda: 1 / 0, name="reader").start()
    if what == "leave-thread":
        threading.Thread(target=time.sleep, args=(60.0,), name="forgotten", daemon=False).start()
    context.ready()
    if what == "take-signal":
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    if what == "stuck":
        time.sleep(60.0)
    context.wait()
    if what == "slow":
        time.sleep(1.0)


def _on_stop(seconds: float) -> None:
    time.sleep(seconds)
    print("on_stop", flush=True)


def main() -> int:
    name, config, what = sys.argv[1:]
    return run_service(name, load_config(config), lambda context: behave(context, what))


def command(name: str, config: Config, what: str) -> list[str]:
    code = "import sys; sys.path.insert(0, 'tests'); from helpers.runtime import main; sys.exit(main())"
    return [sys.executable, "-c", code, name, str(config.source), what]


class Process:
    """A service, its output so far, and how it ends."""

    def __init__(self, name: str, config: Config, what: str) -> None:
        self.name = name
        self.config = config
        self.popen = subprocess.Popen(
            command(name, config, what), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started = time.monotonic()

    def wait_for(self, state: str) -> Pong:
        return wait_for(self.config, self.name, state)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.popen.communicate(timeout=20.0)
        return self.popen.returncode, out, err


@contextmanager
def started(name: str, config: Config, what: str) -> Iterator[Process]:
    process = Process(name, config, what)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


def wait_for(config: Config, name: str, state: str, timeout_s: float = 20.0) -> Pong:
    deadline = time.monotonic() + timeout_s
    while (pong := ping(config, name, 1.0)) is None or pong.state != state:
        assert time.monotonic() < deadline, f"{name} is not {state}: {pong}"
        time.sleep(0.01)
    return pong


def write_config(directory: Path) -> Config:
    path = directory / "c.toml"
    path.write_text(f'[run]\nname = "test"\ndir = "{directory}/run"\n[model]\npath = "{directory}"\n', encoding="utf-8")
    return load_config(path)


def is_alive(pid: int) -> bool:
    """Whether a process that may be nobody's child still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def socket_files(config: Config) -> set[str]:
    return {entry for entry in os.listdir(config.run_dir) if not entry.endswith(".lock")}
