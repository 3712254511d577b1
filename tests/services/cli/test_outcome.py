"""How commands end: exit codes and the one line on stderr."""

from __future__ import annotations

import pytest
from helpers.commands import icebox

from services.cli.outcome import run_to_end
from shared.errors import CheckpointError, ErrorCode, PeerLost, ServiceError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CheckpointError("model: broken"), 78, "icebox: model: broken\n"),
        (ServiceError(ErrorCode.BAD_REQUEST, "too long"), 2, "icebox: too long\n"),
        (ServiceError(ErrorCode.TIMEOUT, "too late"), 1, "icebox: too late\n"),
        (PeerLost("gone"), 69, "icebox: gone\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_a_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    def program() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_to_end(program)
    assert (ended.value.code, capsys.readouterr().err) == (code, line)


def test_ctrl_c_while_a_command_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert icebox(capsys, "status") == (130, "", "")
