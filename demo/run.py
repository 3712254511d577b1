"""`make demo`: the services under honcho, a few prompts through the CLI, and everything down again.

Knows nothing of the model: it runs the same commands that a person would type, and fails if anything stays behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "Tell me a story about a fox.",
    "What is 37 + 45?",
    "Who are you?",
)
NUM_SERVICES = 3
# honcho's own exit status after SIGTERM.
HONCHO_TERMINATED = 128 + signal.SIGTERM
# honcho kills what has not left 5 s after its SIGTERM.
STOP_TIMEOUT_S = 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.toml")
    parser.add_argument("--max-tokens", type=int, default=120)
    args = parser.parse_args()
    config = args.config.resolve()
    shm_before = _shared_memory()
    with honcho(config) as services:
        if icebox("wait", config=config) != 0:
            return _failed(services, "the services did not become ready")
        for prompt in PROMPTS:
            print(f"\n> {prompt}", flush=True)
            if icebox("chat", "--once", prompt, "--max-tokens", str(args.max_tokens), config=config) != 0:
                return _failed(services, "no answer")
        print(flush=True)
        icebox("monitor", "--once", config=config)
    return services.report(left_in_shm=_shared_memory() - shm_before)


class Honcho:
    """One `honcho start`, its log, and whether it went as it should."""

    def __init__(self, config: Path, log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["env", f"ICEBOX_CONFIG={config}", sys.executable, "-m", "honcho", "start"],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def report(self, left_in_shm: set[str]) -> int:
        ends = self.log.read_text(encoding="utf-8", errors="replace").count("stopped exit=0")
        if self.process.returncode != HONCHO_TERMINATED or ends != NUM_SERVICES:
            return _failed(self, f"{ends} of {NUM_SERVICES} services ended well, honcho with {self.process.returncode}")
        if left_in_shm:
            return _failed(self, f"left in /dev/shm: {', '.join(sorted(left_in_shm))}")
        print("All three services stopped cleanly; nothing is left running.")
        self.log.unlink()
        return 0


@contextmanager
def honcho(config: Path) -> Iterator[Honcho]:
    """The services of `config`, running inside the block. Their log is kept if they fail."""
    descriptor, log = tempfile.mkstemp(prefix="icebox-demo-", suffix=".log")
    os.close(descriptor)
    print("Starting expertd, worker and front ...", flush=True)
    services = Honcho(config, Path(log))
    try:
        yield services
    finally:
        started = time.monotonic()
        services.stop()
        print(f"Stopped in {time.monotonic() - started:.1f} s.", flush=True)


def icebox(*arguments: str, config: Path) -> int:
    """Run one `icebox` command on this terminal; its exit status."""
    command, *rest = arguments
    return subprocess.run(
        [sys.executable, "-m", "services.cli", command, "--config", str(config), *rest], cwd=ROOT
    ).returncode


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _failed(services: Honcho, what: str) -> int:
    print(f"demo: {what}; the services' log is {services.log}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
