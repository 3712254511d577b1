"""All three services under honcho: start, stop, and every way of dying together."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers.services import ROOT, SERVICES, Stack, no_shared_memory_left, write_config

from shared.checkpoint.synth import SynthOptions, synthesise

pytestmark = pytest.mark.system

# honcho's exit status after SIGTERM to itself.
HONCHO_TERMINATED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    synthesise(path, SynthOptions(width="tiny"))
    return path


@contextmanager
def honcho(tmp_path: Path, checkpoint: Path) -> Iterator[tuple[subprocess.Popen[bytes], Stack]]:
    """A `honcho start` whose services are READY; nothing of it survives the block."""
    stack = Stack(write_config(tmp_path / "icebox.toml", checkpoint))
    command = ["env", f"ICEBOX_CONFIG={stack.config_path}", f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"]
    with (tmp_path / "honcho.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "honcho", "start"], cwd=ROOT, stdout=log, stderr=log
        )
    try:
        stack.wait_ready(*SERVICES)
        yield process, stack
    finally:
        for left in services_of(stack):
            left.kill()
        process.kill()
        process.wait()


def services_of(stack: Stack) -> list[psutil.Process]:
    """The service processes of this very config."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(stack.config_path) in words and any(f"services.{name}" in words for name in SERVICES):
            found.append(process)
    return found


def wait_gone(stack: Stack, seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while left := services_of(stack):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def test_sigterm_stops_everything_cleanly(tmp_path, checkpoint):
    with no_shared_memory_left(), honcho(tmp_path, checkpoint) as (process, stack):
        assert len(services_of(stack)) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(8.0) == HONCHO_TERMINATED
        wait_gone(stack, 0.5)
        log = (tmp_path / "honcho.log").read_text()
        assert log.count("stopped exit=0") == 3
    assert {p.suffix for p in (tmp_path / "run").iterdir()} <= {".lock"}


def test_honcho_killed_takes_its_services_along(tmp_path, checkpoint):
    with honcho(tmp_path, checkpoint) as (process, stack):
        process.kill()
        wait_gone(stack)


@pytest.mark.parametrize("name", SERVICES)
def test_one_service_killed_ends_all_and_a_new_start_works(tmp_path, checkpoint, name):
    with honcho(tmp_path, checkpoint) as (process, stack):
        victim = next(p for p in services_of(stack) if f"services.{name}" in p.cmdline())
        victim.kill()
        assert process.wait(10.0) != 0
        wait_gone(stack, 0.5)
    with honcho(tmp_path, checkpoint) as (process, stack):
        process.send_signal(signal.SIGTERM)
        assert process.wait(8.0) == HONCHO_TERMINATED
