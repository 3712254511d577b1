"""How a command ends: its errors become one line and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from shared.errors import ErrorCode, ExitCode, IceboxError, ServiceError


def run_to_end(program: Callable[[], object]) -> None:
    """Call it. One of our errors is a line on stderr and its exit code, Ctrl-C is 130: both leave by SystemExit."""
    try:
        program()
    except IceboxError as error:
        print(f"icebox: {text_of(error)}", file=sys.stderr)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def text_of(error: IceboxError) -> str:
    """What a person reads of it: without the code that programs know a service's error by."""
    return error.detail if isinstance(error, ServiceError) else str(error)


def exit_code(error: IceboxError) -> int:
    """What the shell gets: a refused request is the caller's mistake or misfortune, not a crash."""
    if not isinstance(error, ServiceError):
        return error.exit_code
    return {ErrorCode.BAD_REQUEST: ExitCode.USAGE, ErrorCode.PEER_LOST: ExitCode.PEER_LOST}.get(
        error.code, ExitCode.FAILED
    )
