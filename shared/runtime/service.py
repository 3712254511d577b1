"""The life of a service process, from the lock to the exit code. Knows nothing of what the service does.

The service's main function runs in a thread of its own, so that the process's main thread always hears signals and
can end a process whose service is stuck. Everything that asks for the end (a signal, honcho's death, a crashed
thread) only wakes that main thread, which then asks the service to stop and waits for 3 s at most.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shared.config import Config, under_honcho
from shared.errors import ErrorCode, ExitCode, IceboxError, ServiceError
from shared.runtime.boot import make_identity
from shared.runtime.context import ServiceContext
from shared.runtime.logs import configure_logs
from shared.runtime.rundir import claim
from shared.runtime.supervisor import watched_honcho
from shared.transport.request import Request
from shared.transport.server import Server

__all__ = ["Main", "ServiceContext", "run_service"]

log = logging.getLogger(__name__)

Main = Callable[[ServiceContext], None]

# From the request to stop to the end of the process. honcho kills 5 s after its own SIGTERM.
SHUTDOWN_S = 3.0
# Of these, what the service's threads do not get: time to close the control socket and to say what hangs.
LAST_WORDS_S = 0.4
# Bytes in the pipe that wakes the main thread, read at once; how many there are says nothing.
_WAKES = 4096


def run_service(name: str, config: Config, main: Main) -> int:
    """Run a service until it ends or is told to; the process's exit code.

    Must be called in the process's main thread, once. `main` gets the context in another thread, loads, calls
    `ready()`, and returns soon after `context.stop` is set. An IceboxError is logged in one line and gives its exit
    code; any other exception is a bug: traceback, exit 70. A service that does not stop in time ends without return.
    """
    configure_logs(name, config.run.log_level, under_honcho())
    try:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        with claim(name, config), watched_honcho() as honcho:
            return _Supervisor(name, config, main, honcho).run()
    except IceboxError as error:
        log.error("%s", error)
        return error.exit_code
    except Exception:
        log.exception("crashed")
        return ExitCode.CRASH


class _Supervisor:
    """What the main thread does while the service runs."""

    def __init__(self, name: str, config: Config, main: Main, honcho: list[int]) -> None:
        self._main = main
        self._honcho = honcho
        self._context = ServiceContext(config, make_identity(name))
        self._control = Server(
            config.endpoint(f"{name}.control"), self._context.identity, _refuse, status=self._context.pong
        )
        self._exit_code = ExitCode.OK
        self._has_ended = False
        self._crashed_thread: str | None = None
        self._deadline: float | None = None
        self._signals: list[int] = []
        # A pipe, so that Python itself can write to it: the kernel may let any thread take a signal, and then nothing
        # else would end the main thread's waiting.
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._older_threads = set(threading.enumerate())
        self._thread = threading.Thread(target=self._run_main, name=f"{name} main", daemon=True)
        self._stopper = threading.Thread(target=self._context.request_stop, name="on_stop callbacks", daemon=True)

    def run(self) -> int:
        with self._hooks():
            self._control.start()
            try:
                self._thread.start()
                self._watch()
            finally:
                self._control.stop()
            self._join_others()
        os.close(self._wake)
        os.close(self._waker)
        log.info("stopped exit=%d", self._exit_code)
        return self._exit_code

    # --- the service's thread ------------------------------------------------------------------------------------

    def _run_main(self) -> None:
        try:
            self._main(self._context)
        except IceboxError as error:
            log.error("%s", error)
            self._exit_code = error.exit_code
        except BaseException:
            log.exception("crashed")
            self._exit_code = ExitCode.CRASH
        finally:
            self._has_ended = True
            self._wake_up()

    # --- the main thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the service's thread ends. Leaves the process if that takes too long."""
        poller = select.poll()
        for descriptor in (self._wake, *self._honcho):
            poller.register(descriptor, select.POLLIN)
        while not self._has_ended:
            ready = {descriptor for descriptor, _ in poller.poll(self._patience_ms())}
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, _WAKES)
            for descriptor in ready.intersection(self._honcho):
                poller.unregister(descriptor)
                self._stop("honcho is gone")
            if self._signals:
                self._stop(signal.Signals(self._signals[0]).name)
            if self._crashed_thread is not None:
                self._stop(f"thread {self._crashed_thread!r} crashed")
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._give_up([self._thread])
        self._thread.join()
        self._stop(None)

    def _patience_ms(self) -> float | None:
        return None if self._deadline is None else max(1.0, 1000 * (self._deadline - time.monotonic()))

    def _stop(self, reason: str | None) -> None:
        if self._deadline is not None:
            return
        self._deadline = time.monotonic() + SHUTDOWN_S - LAST_WORDS_S
        if reason is not None:
            log.info("stopping reason=%s", reason)
        self._stopper.start()

    def _join_others(self) -> None:
        """Let on_stop callbacks end, and threads that the service left behind and that would keep the interpreter."""
        assert self._deadline is not None
        left = [t for t in threading.enumerate() if not t.daemon and t not in self._older_threads]
        others = [self._stopper, *left]
        for thread in others:
            thread.join(max(0.0, self._deadline - time.monotonic()))
        if alive := [t for t in others if t.is_alive()]:
            self._give_up(alive)

    def _give_up(self, threads: list[threading.Thread]) -> None:
        names = ", ".join(repr(thread.name) for thread in threads)
        log.error("did not stop within %.1f s, leaving at once; still running: %s", SHUTDOWN_S, names)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(self._exit_code or ExitCode.CRASH)

    # --- what wakes it -------------------------------------------------------------------------------------------

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        wakeup = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        hook, threading.excepthook = threading.excepthook, self._on_thread_crash
        try:
            yield
        finally:
            threading.excepthook = hook
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            os.write(self._waker, b"\0")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Takes no lock and logs nothing: the thread it interrupts may hold any of them. It is awake already."""
        if self._signals:
            os.write(sys.stderr.fileno(), b"second signal: leaving at once\n")
            os._exit(ExitCode.FAILED)
        self._signals.append(number)

    def _on_thread_crash(self, crash: threading.ExceptHookArgs) -> None:
        name = crash.thread.name if crash.thread else "unknown"
        log.critical("thread crashed name=%r", name, exc_info=crash.exc_value)
        self._exit_code = ExitCode.CRASH
        self._crashed_thread = name
        self._wake_up()


def _refuse(request: Request) -> None:
    raise ServiceError(ErrorCode.UNSUPPORTED, f"the control socket does not answer {type(request.message).__name__}")
