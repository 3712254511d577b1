"""A file is opened past the page cache where that is to be had, and nothing but its absence is forgiven."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shared.checkpoint.direct_file import open_direct


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT])
@pytest.mark.parametrize("refuses", [True, False])
def test_without_o_direct_only_where_the_file_system_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: int, refuses: bool
) -> None:
    open_, asked = os.open, list[int]()
    path = tmp_path / "file"
    path.write_bytes(b"x")

    def note(path: Path, flags: int, mode: int) -> int:
        asked.append(flags)
        if refuses and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return open_(path, flags & ~os.O_DIRECT, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", note)
        fd, is_direct = open_direct(path, flags)
    assert is_direct is not refuses
    assert [bool(each & os.O_DIRECT) for each in asked] == ([True, False] if refuses else [True])
    assert all(each & flags == flags for each in asked)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_other_errors_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        open_direct(tmp_path / "missing", os.O_RDONLY)
