"""What the front sees of a worker: a server that answers Generate with tokens of the test's choosing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.front.tokenizer import Tokenizer
from shared.checkpoint.synth_tokenizer import tokenizer_files
from shared.config import Config, load_config
from shared.protocol.messages import Generate, Pong, TokensGenerated
from shared.runtime.boot import make_identity
from shared.stats import StatsPublisher, TakePicture
from shared.transport.request import Request
from shared.transport.server import Server

GOLDEN = Path(__file__).parents[1] / "golden"
VOCAB_SIZE = 512

# -> the tokens of the answer, one at a time; may wait
Script = Callable[[Generate], Iterable[int]]


def make_checkpoint(directory: Path) -> Path:
    """A model directory with everything that the front reads, and nothing else."""
    directory.mkdir()
    for name, content in tokenizer_files(VOCAB_SIZE).items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    shutil.copy(GOLDEN / "tiny-a" / "config.json", directory)
    return directory


class FakeWorker:
    """Answers every request in a thread of its own. Counts the requests that it began, and those cancelled."""

    def __init__(self, config: Config, script: Script) -> None:
        self.script = script
        self.tokenizer = Tokenizer.load(config.model.path)
        self.begun: list[Generate] = []
        self.num_cancelled = 0
        self._server = Server(config.endpoint("worker"), make_identity("worker"), self._handle)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def _handle(self, request: Request) -> None:
        assert isinstance(request.message, Generate)
        threading.Thread(target=self._answer, args=(request, request.message), daemon=True).start()

    def _answer(self, request: Request, generate: Generate) -> None:
        self.begun.append(generate)
        started, count = time.perf_counter(), 0

        def reply(ids: tuple[int, ...], finish_reason: str) -> TokensGenerated:
            elapsed = time.perf_counter() - started
            return TokensGenerated(ids, finish_reason, len(generate.prompt_ids), count, 0, elapsed, elapsed)

        for token in self.script(generate):
            if request.cancelled.is_set():
                self.num_cancelled += 1
                request.reply(reply((), "abort"))
                return
            count += 1
            if count == generate.max_tokens:
                request.reply(reply((token,), "length"))
                return
            request.stream(reply((token,), ""))
        request.reply(reply((), "stop"))


@contextmanager
def fake_worker(config: Config, script: Script) -> Iterator[FakeWorker]:
    """A worker at the config's address, inside the block."""
    config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    worker = FakeWorker(config, script)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


@contextmanager
def doomed_worker(config_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker as a process of its own, to be killed: it answers everything with "a", for ever."""
    command = [sys.executable, "-m", "helpers.fake_worker", str(config_path)]
    process = subprocess.Popen(command, cwd=GOLDEN.parent, env={"PYTHONPATH": f"{GOLDEN.parents[1]}:."})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def fake_service(
    config: Config,
    name: str,
    states: Callable[[], tuple[str, str]],
    values: Callable[[], dict[str, float]] = dict,
    take_picture: TakePicture = bytes,
) -> Iterator[None]:
    """A service as its clients see it from outside: it answers pings with a state and publishes statistics."""
    config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = make_identity(name)

    def pong() -> Pong:
        return Pong(name, identity.boot_id, *states(), pid=os.getpid(), uptime_s=1.0)

    control = Server(config.endpoint(f"{name}.control"), identity, lambda _: None, status=pong)
    stats = StatsPublisher(
        config.endpoint(f"{name}.stats"), identity, lambda: (values(), {"policy": "lfu"}), 0.05, take_picture
    )
    control.start()
    stats.start()
    try:
        yield
    finally:
        stats.stop()
        control.stop()


def saying(text: str, tokenizer: Tokenizer) -> Script:
    """Always this answer."""
    ids = tokenizer.encode([(text, True)])
    return lambda _generate: ids


def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait for something that another thread or process brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.002)


def _babble(_generate: Generate) -> Iterator[int]:
    letter = 68  # any ordinary token
    for _ in itertools.count():
        time.sleep(0.005)
        yield letter


if __name__ == "__main__":
    with fake_worker(load_config(sys.argv[1]), _babble):
        threading.Event().wait()
