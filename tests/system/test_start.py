"""What keeps a service from starting is said in one line, with the exit code for it."""

import shutil

import pytest
from helpers.services import ROOT, Stack, running, write_config

from shared.errors import ExitCode

TINY = ROOT / "tests" / "golden" / "tiny-a"

pytestmark = pytest.mark.system


def ends(stack: Stack, name: str) -> tuple[int, str]:
    stack.start(name)
    code = stack.processes[name].wait(30)
    log = stack.log(name)
    assert "Traceback" not in log
    return code, log


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"cache": {"byts": 5}}, "unknown key 'cache.byts'"),
        ({"worker": {"threads": "two"}}, "'worker.threads' must be a whole number"),
        ({"cache": {"policy": "magic"}}, "'cache.policy' must be one of"),
    ],
)
@pytest.mark.parametrize("name", ["expertd", "worker", "front"])
def test_a_bad_config_names_file_and_key(tmp_path, name, sections, words):
    write_config(tmp_path / "good.toml", TINY)
    stack = Stack(tmp_path / "good.toml")
    stack.config_path = write_config(tmp_path / "icebox.toml", TINY, **sections)
    code, log = ends(stack, name)
    assert code == ExitCode.CONFIG
    assert words in log
    assert "icebox.toml" in log


@pytest.mark.parametrize("name", ["expertd", "worker", "front"])
def test_a_missing_model_directory_is_named(tmp_path, name):
    code, log = ends(Stack(write_config(tmp_path / "icebox.toml", tmp_path / "no-such-model")), name)
    assert code == ExitCode.CONFIG
    assert "no-such-model" in log


@pytest.mark.parametrize("name", ["expertd", "worker"])
def test_a_foreign_header_names_the_shard(tmp_path, name):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(TINY, checkpoint, ignore=shutil.ignore_patterns("*golden*"))
    (checkpoint / "model-00002-of-00002.safetensors").write_bytes(b"GGUF" + bytes(100))
    code, log = ends(Stack(write_config(tmp_path / "icebox.toml", checkpoint)), name)
    assert code == ExitCode.CONFIG
    assert "model-00002-of-00002.safetensors" in log


def test_a_second_instance_is_refused_and_the_first_goes_on(tmp_path):
    config = write_config(tmp_path / "icebox.toml", TINY)
    with running(config, "expertd") as first:
        second = Stack(config)
        second.log_path = lambda name: tmp_path / "second.log"  # type: ignore[method-assign]
        code, log = ends(second, "expertd")
        assert code == ExitCode.LOCKED
        assert str(first.processes["expertd"].pid) in log
        first.wait_ready("expertd")


def test_a_worker_answers_while_torch_is_still_being_imported(tmp_path):
    stack = Stack(write_config(tmp_path / "icebox.toml", TINY))
    try:
        stack.start("worker")
        stack.wait_state("worker", "starting", "importing torch")
    finally:
        for process in stack.processes.values():
            process.kill()
            process.wait()


def test_a_worker_waits_for_expertd_and_says_so(tmp_path):
    stack = Stack(write_config(tmp_path / "icebox.toml", TINY))
    try:
        stack.start("worker")
        stack.wait_state("worker", "starting", "waiting for expertd")
        stack.start("expertd")
        stack.wait_ready("expertd", "worker")
        assert stack.stop() == {"worker": 0, "expertd": 0}
    finally:
        for process in stack.processes.values():
            process.kill()
            process.wait()
