"""Hands a file descriptor to other processes of the same user, over a Unix socket (SCM_RIGHTS, unix(7)).

For descriptors that cannot be opened a second time under /proc, such as those of GPU memory. The socket has an abstract
name: no file is left behind, however the process ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading

from shared.errors import CapacityError

_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
TIMEOUT_S = 5.0
RETRY_S = 0.05


class DescriptorServer:
    """Gives `descriptor`, which it owns from now on, to whoever of this user asks at `name`; until `close`."""

    def __init__(self, descriptor: int) -> None:
        self.name = f"icebox-{secrets.token_hex(16)}"
        self._descriptor = descriptor
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="descriptor server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends the accept
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed; or the process has no descriptor left just now, and the visitor waits
                if self._closing.wait(RETRY_S):
                    return
                continue
            with peer:
                self._give(peer)

    def _give(self, peer: socket.socket) -> None:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        try:
            if user == os.getuid():
                socket.send_fds(peer, [b"\0"], [self._descriptor])
        except OSError:
            return  # it went away; the next one may ask


def receive_descriptor(name: str) -> int:
    """The descriptor that a `DescriptorServer` of this name gives; it is the caller's to close.

    Raises:
        CapacityError: nobody of this name gives one to us.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(TIMEOUT_S)
        try:
            server.connect(f"\0{name}")
            _, descriptors, _, _ = socket.recv_fds(server, 1, 1)
        except OSError as error:
            raise CapacityError(f"cannot get shared memory from its owner ({error})") from error
    if not descriptors:
        raise CapacityError("the owner of the shared memory, another user's process, does not give it to us")
    os.set_inheritable(descriptors[0], False)  # recv_fds of Python 3.11 ignores MSG_CMSG_CLOEXEC
    return descriptors[0]
