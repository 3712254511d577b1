"""Reads of one thread that are on their way together: what has arrived is worked on while the rest comes.

Linux's asynchronous reads, io_submit(2): one call hands all of them to the drive, which is as busy as with one large
read, and tells of each as it ends. That is so with O_DIRECT; through the page cache the call itself takes the time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Generator
from typing import NamedTuple, Protocol

from services.expertd.landing import Bytes

log = logging.getLogger(__name__)

PIECE = 2 << 20
"""Bytes of one read, if `MOST` of them do: large enough for a drive's speed, and the last one's copy is soon done."""
MOST = 16
"""Reads on their way at most."""
BLOCK = 4096

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


class Arrival(NamedTuple):
    """A read's bytes, from `begin` to `end`; short of `wanted` at the file's end, or for reasons of the kernel's."""

    begin: int
    end: int
    wanted: int


class Reads(Protocol):
    """One thread's."""

    def read(self, descriptor: int, offset: int, out: Bytes) -> Generator[Arrival, None, None]:
        """Fill `out` from `offset` of a file: where what has arrived lies in `out`, in any order.

        However this ends, nothing is on its way to `out` afterwards; who does not exhaust it, closes it.

        Raises:
            OSError: one of the reads failed.
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
        self._commands = (_Command * MOST)()
        address, size = ctypes.addressof(self._commands), ctypes.sizeof(_Command)
        self._pointers = (ctypes.c_void_p * MOST)(*(address + size * i for i in range(MOST)))
        self._events = (_Event * MOST)()
        _system(self._setup, MOST, ctypes.byref(self._context))

    def read(self, descriptor: int, offset: int, out: Bytes) -> Generator[Arrival, None, None]:
        begins = _begins(len(out))
        self._prepare(descriptor, offset, out, begins)
        begun = pending = 0
        try:
            while begun < len(begins):
                pointers = ctypes.byref(self._pointers, begun * ctypes.sizeof(ctypes.c_void_p))
                more = _system(self._submit, self._context, len(begins) - begun, pointers)
                begun, pending = begun + more, pending + more
            while pending:
                ended = self._wait()
                pending -= len(ended)
                for begin, count in ended:
                    if count < 0:
                        raise OSError(-count, os.strerror(-count))
                    yield Arrival(begin, begin + count, min(begin + begins.step, len(out)))
        finally:
            while pending:
                pending -= len(self._wait())

    def close(self) -> None:
        if self._context.value:
            _system(self._destroy, self._context)
            self._context.value = 0

    def _prepare(self, descriptor: int, offset: int, out: Bytes, begins: range) -> None:
        for command, begin in zip(self._commands, begins, strict=False):
            command.data, command.opcode, command.descriptor = begin, _PREAD, descriptor
            command.memory, command.nbytes = out.ctypes.data + begin, min(begins.step, len(out) - begin)
            command.offset = offset + begin

    def _wait(self) -> list[tuple[int, int]]:
        """At least one that has ended: where it begins, and bytes read or a negative errno."""
        while True:
            try:
                count = _system(self._get_events, self._context, 1, MOST, self._events, None)
                return [(event.data, event.result) for event in self._events[:count]]
            except InterruptedError:
                continue


class BlockingReads:
    """One after the other, where the kernel has nothing better."""

    def read(self, descriptor: int, offset: int, out: Bytes) -> Generator[Arrival, None, None]:
        begins = _begins(len(out))
        for begin in begins:
            wanted = min(begin + begins.step, len(out))
            yield Arrival(begin, begin + os.preadv(descriptor, [out[begin:wanted].data], offset + begin), wanted)

    def close(self) -> None:
        pass


def make_reads(count: int) -> list[Reads]:
    """For so many threads."""
    try:
        return [AsyncReads() for _ in range(count)]
    except OSError as error:
        log.warning("no asynchronous reads here (%s): records are read piece by piece", error.strerror)
        return [BlockingReads() for _ in range(count)]


def _begins(nbytes: int) -> range:
    """Where pieces begin; the step is their size, in whole blocks."""
    return range(0, nbytes, max(PIECE, -(-nbytes // (MOST * BLOCK)) * BLOCK))


def _system(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
