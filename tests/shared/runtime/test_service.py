"""The life of a service as others see it: signals, locks, exit codes, and the log lines that explain them."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers.runtime import command, is_alive, socket_files, started, wait_for
from helpers.transport import ROOT, fetch, until

from shared.config import Config
from shared.errors import ErrorCode, ExitCode, ServiceError
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient


def error_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if " ERROR " in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(config: Config, number: signal.Signals) -> None:
    with started("front", config, "run") as process:
        pong = process.wait_for("ready")
        assert (pong.service, pong.pid) == ("front", process.popen.pid)
        assert socket_files(config) == {"front.control"}
        process.popen.send_signal(number)
        asked = time.monotonic()
        code, out, log = process.end()
        assert time.monotonic() - asked < 1.0
    assert code == ExitCode.OK
    assert out == "on_stop\n"
    assert f"stopping reason={number.name}" in log
    assert not error_lines(log)
    assert not socket_files(config)


def test_a_signal_that_another_thread_takes_stops_it(config: Config) -> None:
    """The kernel may give a signal to a thread that has just begun; it then interrupts nothing in the main thread."""
    with started("front", config, "take-signal") as process:
        code, _, log = process.end()
    assert code == ExitCode.OK
    assert "stopping reason=SIGTERM" in log


def test_it_answers_while_it_loads_and_can_be_stopped_then(config: Config) -> None:
    with started("worker", config, "load") as process:
        pong = process.wait_for("starting")
        until(lambda: wait_for(config, "worker", "starting").detail == "shard 3 of 48")
        assert pong.boot_id == wait_for(config, "worker", "starting").boot_id
        process.popen.terminate()
        assert process.end()[0] == ExitCode.OK


def test_it_is_draining_until_it_has_stopped(config: Config) -> None:
    with started("worker", config, "slow") as process:
        process.wait_for("ready")
        process.popen.terminate()
        process.wait_for("draining")
        assert process.end()[0] == ExitCode.OK


def test_on_stop_callbacks_end_before_the_process_does(config: Config) -> None:
    with started("worker", config, "slow-callback") as process:
        process.wait_for("ready")
        process.popen.terminate()
        code, out, _ = process.end()
    assert (code, out) == (ExitCode.OK, "on_stop\n")


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("return", ExitCode.OK, None),
        ("config", ExitCode.CONFIG, "c.toml: 'cache.bytes' must be larger"),
        ("checkpoint", ExitCode.CONFIG, "model-00001.safetensors is truncated"),
        ("capacity", ExitCode.CONFIG, "the cache needs 24 slots"),
        ("peer-lost", ExitCode.PEER_LOST, "peer_lost: expertd went away"),
        ("service", ExitCode.CRASH, "io_error: the disk is on fire"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(config: Config, what: str, code: ExitCode, text: str | None) -> None:
    with started("expertd", config, what) as process:
        got, _, log = process.end()
    assert got == code
    assert "Traceback" not in log
    assert [line.partition(" ERROR ")[2] for line in error_lines(log)] == ([text] if text else [])


@pytest.mark.parametrize(("what", "text"), [("bug", "ZeroDivisionError: a bug"), ("exit", "SystemExit")])
def test_a_bug_is_a_traceback(config: Config, what: str, text: str) -> None:
    with started("expertd", config, what) as process:
        code, _, log = process.end()
    assert code == ExitCode.CRASH
    assert "Traceback" in log
    assert text in log


def test_a_crashed_thread_stops_the_service(config: Config) -> None:
    with started("expertd", config, "crash-thread") as process:
        code, out, log = process.end()
    assert code == ExitCode.CRASH
    assert out == "on_stop\n"
    assert "thread crashed name='reader'" in log
    assert "ZeroDivisionError" in log


def test_a_stuck_service_is_gone_within_3_s(config: Config) -> None:
    with started("worker", config, "stuck") as process:
        process.wait_for("ready")
        process.popen.terminate()
        asked = time.monotonic()
        code, _, log = process.end()
        assert 2.0 < time.monotonic() - asked < 3.0
    assert code == ExitCode.CRASH
    assert "did not stop within 3.0 s, leaving at once; still running: 'worker main'" in log
    assert re.search(r'runtime\.py", line \d+ in behave', log), "the log shows where it was stuck"


def test_a_forgotten_thread_does_not_keep_it(config: Config) -> None:
    with started("worker", config, "leave-thread") as process:
        process.wait_for("ready")
        process.popen.terminate()
        asked = time.monotonic()
        code, _, log = process.end()
        assert time.monotonic() - asked < 3.0
    assert code == ExitCode.CRASH
    assert "still running: 'forgotten'" in log


def test_a_second_signal_ends_it_at_once(config: Config) -> None:
    with started("worker", config, "stuck") as process:
        process.wait_for("ready")
        process.popen.terminate()
        process.wait_for("draining")
        process.popen.send_signal(signal.SIGINT)
        asked = time.monotonic()
        code, _, log = process.end()
        assert time.monotonic() - asked < 1.0
    assert code == ExitCode.FAILED
    assert "second signal" in log


def test_sigusr1_shows_where_it_is_and_nothing_stops(config: Config) -> None:
    with started("worker", config, "run") as process:
        process.wait_for("ready")
        process.popen.send_signal(signal.SIGUSR1)
        process.wait_for("ready")
        process.popen.terminate()
        code, _, log = process.end()
    assert code == ExitCode.OK
    assert re.search(r'runtime\.py", line \d+ in behave', log)


# --- two of them ---------------------------------------------------------------------------------------------------


def test_a_second_instance_leaves_and_disturbs_nothing(config: Config) -> None:
    with started("worker", config, "run") as first:
        before = first.wait_for("ready")
        with started("worker", config, "run") as second:
            code, out, log = second.end()
        assert (code, out) == (ExitCode.LOCKED, "")
        assert f"worker already runs in {config.run_dir} as process {first.popen.pid};" in log
        assert len(log.splitlines()) == 1
        assert first.wait_for("ready").boot_id == before.boot_id
        with started("front", config, "run") as other:
            other.wait_for("ready")


def test_a_killed_instance_leaves_nothing_in_the_way(config: Config) -> None:
    with started("worker", config, "run") as first:
        before = first.wait_for("ready")
        first.popen.kill()
        first.end()
    for suffix in ("", ".stats"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(f"{config.run_dir}/worker{suffix}")
    assert socket_files(config) == {"worker", "worker.control", "worker.stats"}
    with started("worker", config, "run") as second:
        assert second.wait_for("ready").boot_id != before.boot_id
        assert socket_files(config) == {"worker.control"}


def test_a_run_directory_that_cannot_be_used(config: Config) -> None:
    config.run_dir.write_text("in the way")
    with started("worker", config, "run") as process:
        code, _, log = process.end()
    assert code == ExitCode.CONFIG
    assert "set run.dir" in log
    assert "Traceback" not in log


def test_the_control_socket_answers_ping_only(config: Config) -> None:
    with started("worker", config, "run") as process:
        process.wait_for("ready")
        client = BlockingClient(config.endpoint("worker.control"), make_identity("test"))
        client.connect(5.0)
        with pytest.raises(ServiceError) as caught:
            client.call(fetch(0), 5.0)
        client.close()
    assert caught.value.code is ErrorCode.UNSUPPORTED


# --- under honcho --------------------------------------------------------------------------------------------------


def _honcho(config: Config, what: str) -> subprocess.Popen[str]:
    procfile = config.source.parent / "Procfile"
    lines = [f"{name}: exec {_shell(command(name, config, what))}" for name in ("expertd", "worker")]
    procfile.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "honcho", "-f", str(procfile), "-d", str(ROOT), "start"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _shell(words: list[str]) -> str:
    return " ".join(f"'{word}'" if not re.search(r"'", word) else f'"{word}"' for word in words)


def test_honcho_stops_its_services_cleanly(config: Config) -> None:
    honcho = _honcho(config, "run")
    for name in ("expertd", "worker"):
        wait_for(config, name, "ready")
    honcho.terminate()
    out, _ = honcho.communicate(timeout=20.0)
    for name in ("expertd", "worker"):
        assert re.search(rf"{name}\.1 +\| INFO state=ready", out), out
        assert f"{name}.1 stopped (rc=0)" in out
    assert not socket_files(config)


def test_services_do_not_outlive_a_killed_honcho(config: Config) -> None:
    honcho = _honcho(config, "run")
    pids = [wait_for(config, name, "ready").pid for name in ("expertd", "worker")]
    honcho.kill()
    killed = time.monotonic()
    try:
        until(lambda: not any(map(is_alive, pids)))
        assert time.monotonic() - killed < 1.0
    finally:
        honcho.communicate()
    assert not socket_files(config)


def test_the_first_to_fail_stops_the_others_with_its_code(config: Config) -> None:
    honcho = _honcho(config, "config")
    out, _ = honcho.communicate(timeout=20.0)
    assert honcho.returncode == ExitCode.CONFIG, out
    assert "ERROR c.toml: 'cache.bytes' must be larger" in out
