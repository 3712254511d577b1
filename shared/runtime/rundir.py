"""The run directory of an instance: private to its user, one live process per service.

The lock is a flock, so it ends with its holder however that dies. Only under the lock may stale sockets be removed:
binding an ipc address that a live process serves would silently take it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.config import Config
from shared.errors import ConfigError, LockedError

# Of the files that a service makes for as long as it lives; one that was killed leaves them.
FILE_SUFFIXES = ("", ".control", ".stats", ".http")


@contextmanager
def claim(service: str, config: Config) -> Iterator[None]:
    """Make the run directory and hold this service's lock in it.

    Raises:
        ConfigError: the directory cannot be made, or belongs to someone else.
        LockedError: a live process holds the lock.
    """
    directory = config.run_dir
    make_private(directory, own_parent=config.run.dir is None)
    lock = hold_lock(directory / f"{service}.lock", f"{service} already runs in {directory}", "set another run.name")
    try:
        for suffix in FILE_SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                (directory / f"{service}{suffix}").unlink()
        yield
    finally:
        os.close(lock)


def make_private(directory: Path, own_parent: bool) -> None:
    """Create `directory` for this user only. `own_parent`: its parent must be ours too, as under a shared /tmp."""
    try:
        for missing in reversed([directory, *directory.parents]):
            if not missing.exists():
                missing.mkdir(mode=0o700, exist_ok=True)
        _check_owner(directory)
        if own_parent:
            _check_owner(directory.parent)
        if stat.S_IMODE(directory.stat().st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot use run directory {directory}: {error.strerror}; set run.dir") from error


def _check_owner(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"run directory {directory} is not a directory; remove it or set run.dir")
    if status.st_uid != os.getuid():
        raise ConfigError(f"run directory {directory} belongs to user {status.st_uid}; set run.dir to one of yours")


def hold_lock(path: Path, busy: str, advice: str) -> int:
    """An open descriptor that holds the lock at `path`, whose content names this process; close it to let go.

    Raises:
        ConfigError: the file cannot be used; the message ends with `advice`.
        LockedError: a live process holds the lock; the message begins with `busy` and ends with `advice`.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use lock file {path}: {error.strerror}; {advice}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise LockedError(f"{busy} as process {holder}; stop it, or {advice}") from None
    os.pwrite(descriptor, f"{os.getpid():<20}\n".encode(), 0)
    return descriptor
