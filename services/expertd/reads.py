"""Reads of one record that arrive piece by piece: what is there is worked on while the rest comes.

Linux's asynchronous reads, io_submit(2), two at a time, so that a drive always has one to go on with. With more than
two, or if submitted in one call, a virtual machine's drive reports all of them only when the last is done. They are
asynchronous with O_DIRECT; through the page cache the call itself takes the time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from services.expertd.landing import Bytes

log = logging.getLogger(__name__)

PIECE = 8 << 20
"""Bytes of one read. Smaller ones would leave less to copy after the last, and each takes a reader's turns: with six
readers at work, waiting for Python's lock costs more than a copy."""
DEPTH = 2
"""Reads on their way."""

# io_setup, io_destroy, io_submit, io_getevents: linux/arch/*/entry/syscalls, linux/include/uapi/asm-generic/unistd.h
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_PREAD = 0

_libc = ctypes.CDLL(None, use_errno=True)


class _Command(ctypes.Structure):
    """struct iocb of linux/aio_abi.h, on machines with the low byte first."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_descriptor", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """struct io_event: `data` of the command, and bytes read or a negative errno."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("command", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class Stretch(NamedTuple):
    """What of a file goes to `out`. `file` is its name, for errors."""

    file: Path
    descriptor: int
    offset: int
    out: Bytes

    def read(self, begin: int, end: int) -> int:
        """Read a part of it; how much of that came. Raises OSError, which names the file."""
        try:
            return os.preadv(self.descriptor, [self.out[begin:end].data], self.offset + begin)
        except OSError as error:
            raise self.error(error.errno) from error

    def error(self, number: int | None) -> OSError:
        return OSError(number, os.strerror(number or 0), str(self.file))


class Arrival(NamedTuple):
    """A read's bytes in `out` of a stretch, by its number: from `begin` to `end`, which is short of `wanted` at the
    file's end, or for reasons of the kernel's."""

    stretch: int
    begin: int
    end: int
    wanted: int


class Reads(Protocol):
    """Not thread-safe: one user at a time."""

    def read(self, stretches: Sequence[Stretch]) -> Generator[Arrival, None, None]:
        """Fill them all: what has arrived, in any order.

        However this ends, nothing is on its way any more; who does not exhaust it, closes it.

        Raises:
            OSError: one of the reads failed; names its file.
        """

    def close(self) -> None: ...


class AsyncReads:
    """By io_submit(2)."""

    def __init__(self) -> None:
        """Raises OSError if there is no such thing here."""
        if platform.machine() not in _NUMBERS:
            raise OSError(errno.ENOSYS, f"not known on {platform.machine()}")
        self._setup, self._destroy, self._submit, self._get_events = _NUMBERS[platform.machine()]
        self._context = ctypes.c_uint64(0)
        self._commands = (_Command * DEPTH)(*(_Command(data=number, opcode=_PREAD) for number in range(DEPTH)))
        self._events = (_Event * DEPTH)()
        _system(self._setup, DEPTH, ctypes.byref(self._context))

    def read(self, stretches: Sequence[Stretch]) -> Generator[Arrival, None, None]:
        waiting, arrived = deque(_pieces(stretches)), list[Arrival]()
        addresses = [stretch.out.ctypes.data for stretch in stretches]
        idle, pending = list(range(DEPTH)), dict[int, Arrival]()
        try:
            while waiting or pending or arrived:
                while waiting and idle:
                    piece = waiting.popleft()
                    self._start(idle[-1], stretches[piece.stretch], addresses[piece.stretch], piece)
                    pending[idle.pop()] = piece
                yield from arrived  # under the next reads
                ended = self._wait() if pending else []
                idle += (number for number, _ in ended)
                arrived = [_arrival(stretches, pending.pop(number), count) for number, count in ended]
        finally:
            while len(idle) < DEPTH:
                idle += (number for number, _ in self._wait())

    def close(self) -> None:
        if self._context.value:
            _system(self._destroy, self._context)
            self._context.value = 0

    def _start(self, number: int, stretch: Stretch, address: int, piece: Arrival) -> None:
        command = self._commands[number]
        command.descriptor, command.offset = stretch.descriptor, stretch.offset + piece.begin
        command.memory, command.nbytes = address + piece.begin, piece.wanted - piece.begin
        pointer = ctypes.c_void_p(ctypes.addressof(command))
        try:
            _system(self._submit, self._context, 1, ctypes.byref(pointer))
        except OSError as error:
            raise stretch.error(error.errno) from error

    def _wait(self) -> list[tuple[int, int]]:
        """At least one command that has ended, by its number: bytes read or a negative errno."""
        while True:
            try:
                count = _system(self._get_events, self._context, 1, DEPTH, self._events, None)
            except InterruptedError:
                continue
            return [(event.data, event.result) for event in self._events[:count]]


class BlockingReads:
    """One after the other, where the kernel has nothing better."""

    def read(self, stretches: Sequence[Stretch]) -> Generator[Arrival, None, None]:
        for piece in _pieces(stretches):
            count = stretches[piece.stretch].read(piece.begin, piece.wanted)
            yield piece._replace(end=piece.begin + count)

    def close(self) -> None:
        pass


def make_reads(count: int) -> list[Reads]:
    """So many, of the best kind that there is here."""
    made: list[Reads] = []
    try:
        made.extend(AsyncReads() for _ in range(count))
        return made
    except OSError as error:
        for each in made:
            each.close()
        log.warning("no asynchronous reads here (%s): records are read piece by piece", error.strerror)
        return [BlockingReads() for _ in range(count)]


def _pieces(stretches: Sequence[Stretch]) -> Iterator[Arrival]:
    """Nothing of them is there yet."""
    for number, stretch in enumerate(stretches):
        for begin in range(0, len(stretch.out), PIECE):
            yield Arrival(number, begin, begin, min(begin + PIECE, len(stretch.out)))


def _arrival(stretches: Sequence[Stretch], piece: Arrival, count: int) -> Arrival:
    """With so many bytes; a negative number is that of an error."""
    if count < 0:
        raise stretches[piece.stretch].error(-count)
    return piece._replace(end=piece.begin + count)


def _system(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
