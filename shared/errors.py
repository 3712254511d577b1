"""What can go wrong, by name: error codes on the wire, exceptions in the code, exit codes of processes.

Every message says what happened, where, and what to do about it; the code is for programs, the text for people.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class ErrorCode(StrEnum):
    """The closed set of reasons an `ErrorReply` can carry."""

    BAD_MESSAGE = "bad_message"
    BAD_REQUEST = "bad_request"
    VERSION = "version"
    STARTING = "starting"
    DRAINING = "draining"
    UNSUPPORTED = "unsupported"
    NO_CAPACITY = "no_capacity"
    IO_ERROR = "io_error"
    CANCELLED = "cancelled"
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


class ExitCode(IntEnum):
    """Why a process ended (values from sysexits.h where one fits)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PEER_LOST = 69
    CRASH = 70
    LOCKED = 75
    CONFIG = 78


class IceboxError(Exception):
    """Base of every error that is ours to explain; `exit_code` is what a process that dies of it returns."""

    exit_code: ExitCode = ExitCode.CRASH


class ConfigError(IceboxError):
    """A config file, key or value that cannot be used; the message names file and key."""

    exit_code = ExitCode.CONFIG


class CheckpointError(IceboxError):
    """A model directory, shard or tensor that cannot be used; the message names file and tensor."""

    exit_code = ExitCode.CONFIG


class CapacityError(IceboxError):
    """A budget that does not fit; the message names the number that would."""

    exit_code = ExitCode.CONFIG


class DeviceError(IceboxError):
    """A GPU or its driver that failed; names the driver's function and its result, such as CUDA_ERROR_..."""

    def __init__(self, function: str, result: str) -> None:
        super().__init__(f"{function}: {result}")
        self.result = result


class LockedError(IceboxError):
    """The run directory belongs to another live instance; the message names its process id."""

    exit_code = ExitCode.LOCKED


class ProtocolError(IceboxError):
    """Bytes that are not one of our messages. The only exception `decode` raises."""


class ServiceError(IceboxError):
    """The final reply of a request was an error."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(f"{code.value}: {detail}")
        self.code = code
        self.detail = detail


class PeerLost(ServiceError):
    """The other side of a socket went away, or restarted, while a request was pending."""

    exit_code = ExitCode.PEER_LOST

    def __init__(self, detail: str) -> None:
        super().__init__(ErrorCode.PEER_LOST, detail)
