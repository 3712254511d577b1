"""Real services as processes, on a config of the test's own: start, wait, kill, and look at what they left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shared.config import Config, load_config
from shared.protocol.messages import Generate, TokensGenerated
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient
from shared.transport.control import ping

from .gpu import eventually

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("expertd", "worker", "front")
START_TIMEOUT_S = 60.0
COMPILE_TIMEOUT_S = 300.0

Table = dict[str, dict[str, object]]


def write_config(path: Path, checkpoint: Path, **sections: dict[str, object]) -> Path:
    """A config for `checkpoint` with its run directory beside it; sections override or add keys."""
    table: Table = {
        "run": {"name": "test", "dir": str(path.parent / "run")},
        "model": {"path": str(checkpoint), "max_context": 512},
        "cache": {"bytes": "2 MiB", "save_heat": False},
        "worker": {"threads": 1, "prefill_chunk": 64},
    }
    for name, keys in sections.items():
        table[name] = table.get(name, {}) | keys
    path.write_text("\n".join(_toml_section(name, keys) for name, keys in table.items()), encoding="utf-8")
    return path


def _toml_section(name: str, keys: dict[str, object]) -> str:
    lines = [f"{k} = {str(v).lower() if isinstance(v, bool | int | float) else repr(str(v))}" for k, v in keys.items()]
    return f"[{name}]\n" + "\n".join(lines) + "\n"


class Stack:
    """The services of one config, each started by itself (no honcho), their logs in files."""

    def __init__(self, config_path: Path) -> None:
        self.config_path = config_path
        self.config: Config = load_config(config_path)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start_timeout_s = START_TIMEOUT_S if self.config.worker.device == "cpu" else COMPILE_TIMEOUT_S
        self.closing = ExitStack()  # what the test opened on these services, closed with them

    def start(self, *names: str) -> None:
        for name in names or SERVICES:
            with self.log_path(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", f"services.{name}", "--config", str(self.config_path)],
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def log_path(self, name: str) -> Path:
        return self.config_path.parent / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_path(name).read_text(encoding="utf-8", errors="replace")

    def wait_ready(self, *names: str) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        for name in names or SERVICES:
            while (pong := ping(self.config, name, 0.5)) is None or pong.state != "ready":
                exited = self.processes[name].poll() if name in self.processes else None
                assert exited is None, f"{name} exited with {exited}:\n{self.log(name)}"
                assert time.monotonic() < deadline, f"{name} not ready ({pong}):\n{self.log(name)}"
                time.sleep(0.02)

    def wait_state(self, name: str, state: str, detail: str) -> None:
        """Until the service says that it is in this state, with these words."""
        deadline = time.monotonic() + self.start_timeout_s
        while (pong := ping(self.config, name, 0.5)) is None or pong.state != state or detail not in pong.detail:
            assert time.monotonic() < deadline, f"{name} says {pong}:\n{self.log(name)}"
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def terminate(self, name: str) -> int:
        """SIGTERM, and the exit status."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self._end(name)

    def stop(self) -> dict[str, int]:
        """SIGTERM to all at once, as honcho does it; exit status of each."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: self._end(name) for name in list(self.processes)}

    def _end(self, name: str) -> int:
        """The exit status; a service that goes on stays among the processes, which are killed in the end."""
        status = self.processes[name].wait(8.0)
        del self.processes[name]
        return status


@contextmanager
def running(config_path: Path, *names: str) -> Iterator[Stack]:
    """The named services (all three by default), READY inside the block; never left behind."""
    stack = Stack(config_path)
    try:
        stack.start(*names)
        stack.wait_ready(*names)
        yield stack
    finally:
        stack.closing.close()
        for process in stack.processes.values():
            process.kill()
            process.wait()


@contextmanager
def worker_client(config: Config) -> Iterator[BlockingClient]:
    """A connected client of the worker."""
    client = BlockingClient(config.endpoint("worker"), make_identity("test"))
    try:
        client.connect(10.0)
        yield client
    finally:
        client.close()


def generate(client: BlockingClient, message: Generate, timeout_s: float = 60.0) -> list[TokensGenerated]:
    """All replies to one request; raises what the client raises."""
    request_id = client.start(message)
    replies: list[TokensGenerated] = []
    deadline = time.monotonic() + timeout_s
    while not replies or not replies[-1].finish_reason:
        assert time.monotonic() < deadline, f"no final reply in {timeout_s} s after {len(replies)} tokens"
        if (event := client.poll(1.0)) is not None and event[0] == request_id:
            assert isinstance(event[1], TokensGenerated)
            replies.append(event[1])
    return replies


def token_ids(replies: Sequence[TokensGenerated]) -> list[int]:
    return [token for reply in replies for token in reply.token_ids]


@contextmanager
def no_shared_memory_left() -> Iterator[None]:
    """No new name stays in /dev/shm after the block. Other programs of the machine make some and remove them."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    eventually(lambda: left.isdisjoint(os.listdir("/dev/shm")), lambda: f"left in /dev/shm: {left}")
