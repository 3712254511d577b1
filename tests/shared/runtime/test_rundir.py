"""The run directory: private, ours, and claimed by one process at a time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from helpers.runtime import socket_files

from shared.config import Config
from shared.errors import ConfigError, LockedError
from shared.runtime import rundir
from shared.runtime.rundir import claim, make_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_private_with_its_parents(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b", own_parent=True)
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_one_that_is_open_to_others_is_closed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(0o777)
    make_private(directory, own_parent=False)
    assert mode(directory) == 0o700


@pytest.mark.parametrize("own_parent", [False, True])
def test_one_that_belongs_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_parent: bool
) -> None:
    parent = tmp_path / "parent"
    foreign = parent if own_parent else parent / "run"
    (parent / "run").mkdir(parents=True)
    real = os.lstat

    def lstat(path: Path) -> os.stat_result:
        status = list(real(path))
        status[4] += path == foreign
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(ConfigError, match=f"{foreign} belongs to user"):
        make_private(parent / "run", own_parent=own_parent)
    monkeypatch.undo()
    if own_parent:
        make_private(parent / "run", own_parent=False)


def test_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=f"{name} is not a directory"):
            make_private(tmp_path / name, own_parent=False)
    with pytest.raises(ConfigError, match=r"cannot use run directory .*file/run"):
        make_private(tmp_path / "file" / "run", own_parent=False)


def test_the_lock_names_its_holder_and_ends_with_it(config: Config) -> None:
    with claim("worker", config):
        with pytest.raises(LockedError, match=f"worker already runs in {config.run_dir} as process {os.getpid()};"):
            claim("worker", config).__enter__()
        with claim("front", config):
            pass
    with claim("worker", config):
        pass


def test_stale_sockets_go_only_under_the_lock(config: Config) -> None:
    with claim("worker", config):
        for name in ("worker", "worker.control", "worker.stats", "front"):
            (config.run_dir / name).touch()
        with pytest.raises(LockedError):
            claim("worker", config).__enter__()
        assert len(socket_files(config)) == 4
    with claim("worker", config):
        assert socket_files(config) == {"front"}


def test_a_lock_that_cannot_be_opened_is_named(config: Config) -> None:
    (config.run_dir / "worker.lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"worker\.lock"):
        claim("worker", config).__enter__()


def test_the_files_are_those_of_the_contract(config: Config) -> None:
    *sockets, http = (config.run_dir / f"front{suffix}" for suffix in rundir.FILE_SUFFIXES)
    assert [f"ipc://{path}" for path in sockets] == [
        config.endpoint("front"),
        config.endpoint("front.control"),
        config.endpoint("front.stats"),
    ]
    assert http == config.http_address_file
