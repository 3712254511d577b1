"""The monitor as a process: on nothing, on one service that comes and goes, and killed."""

import json

import pytest
from helpers.fake_worker import fake_service, make_checkpoint
from helpers.icebox import icebox, on_terminal
from helpers.services import write_config

from shared.config import load_config


@pytest.fixture
def config_path(tmp_path):
    return write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))


class Counter:
    def __init__(self):
        self.uses = 0.0

    def values(self):
        self.uses += 10
        return {"uses": self.uses, "misses": self.uses / 10, "moe_layers": 2.0, "experts": 16.0, "heat.0": 4.0}


def test_once_as_json(config_path):
    config = load_config(config_path)
    with fake_service(config, "expertd", lambda: ("ready", ""), Counter().values):
        run = icebox("monitor", "--once", "--json", config=config_path)
    assert (run.returncode, run.stderr) == (0, "")
    view = json.loads(run.stdout)
    assert [service["state"] for service in view["services"]] == ["ready", "not running", "not running"]
    assert view["cache"]["miss_rate"] == pytest.approx(0.1)
    assert view["cache"]["uses_per_s"] > 50
    assert (view["cache"]["layers"][0]["resident"], view["worker"]) == (4, None)


def test_once_on_nothing(config_path):
    run = icebox("monitor", "--once", config=config_path)
    assert (run.returncode, run.stdout.count("not running"), run.stderr) == (0, 3, "")


def test_lives_through_a_restart_and_leaves_on_ctrl_c(config_path):
    config = load_config(config_path)
    with on_terminal("monitor", "--config", str(config_path)) as terminal:
        terminal.expect("not running")
        with fake_service(config, "expertd", lambda: ("starting", "2 of 9 files"), Counter().values):
            terminal.expect("2 of 9 files")
            terminal.expect("90.0% hits")
        terminal.expect(r"expertd\x1b\[0m\s+\x1b\[31mnot running")
        # Its numbers go too: nothing is between the last service's row and the last line.
        terminal.expect(r"front\s*\x1b\[0m\s+\x1b\[31mnot running\x1b\[0m\s*\r\n\x1b\[2mCtrl-C leaves")
        with fake_service(config, "expertd", lambda: ("ready", ""), Counter().values):
            terminal.expect(r"expertd\x1b\[0m\s+\x1b\[32mready")
            terminal.type("\x03")
            assert terminal.ends() == 0
    assert "Traceback" not in terminal.shown


def test_being_killed_changes_nothing_for_the_services(config_path):
    config = load_config(config_path)
    counter = Counter()
    with fake_service(config, "expertd", lambda: ("ready", ""), counter.values):
        with on_terminal("monitor", "--config", str(config_path)) as terminal:
            terminal.expect("90.0% hits")
            terminal.process.kill()
        view = json.loads(icebox("monitor", "--once", "--json", config=config_path).stdout)
    assert view["services"][0]["state"] == "ready"
    assert view["cache"]["uses"] > 0


@pytest.mark.parametrize(
    ("flags", "complaint"), [(["--json"], "--json needs --once"), ([], "a live view needs a terminal")]
)
def test_usage(config_path, flags, complaint):
    run = icebox("monitor", *flags, config=config_path)
    assert (run.returncode, f"icebox monitor: error: {complaint}" in run.stderr) == (2, True)
