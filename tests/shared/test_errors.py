"""Errors: each has its exit code, and its text says what a person needs."""

from __future__ import annotations

import pytest

from shared.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ErrorCode,
    ExitCode,
    IceboxError,
    LockedError,
    PeerLost,
    ProtocolError,
    ServiceError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IceboxError("x"), 70),
        (ProtocolError("x"), 70),
        (ServiceError(ErrorCode.IO_ERROR, "x"), 70),
        (PeerLost("x"), 69),
        (LockedError("x"), 75),
        (ConfigError("x"), 78),
        (CheckpointError("x"), 78),
        (CapacityError("x"), 78),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(error: IceboxError, code: int) -> None:
    assert error.exit_code == code


def test_a_lost_peer_is_a_service_error_with_its_code() -> None:
    lost = PeerLost("expertd went away")
    assert isinstance(lost, ServiceError)
    assert (lost.code, lost.detail) == (ErrorCode.PEER_LOST, "expertd went away")
    assert str(lost) == "peer_lost: expertd went away"


def test_codes_are_their_text_on_the_wire() -> None:
    assert [ErrorCode(code.value) for code in ErrorCode] == list(ErrorCode)
    assert all(code.value == code.name.lower() for code in ErrorCode)
    assert ExitCode.OK == 0
