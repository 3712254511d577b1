"""A descriptor reaches another process of the same user, as often as it is asked for, and nobody once it is closed."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.descriptors import no_descriptor_left

from shared.errors import CapacityError
from shared.memory import descriptor as descriptor_module
from shared.memory.descriptor import DescriptorServer, receive_descriptor

ROOT = Path(__file__).resolve().parents[3]

PEER = """
import os, sys
from shared.memory.descriptor import receive_descriptor
print(os.pread(receive_descriptor(sys.argv[1]), 5, 0).decode())
"""


@pytest.fixture
def server():
    file = os.memfd_create("test")
    os.write(file, b"bytes")
    server = DescriptorServer(file)
    yield server
    server.close()


def test_other_processes_get_it(server):
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PEER, server.name], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == "bytes\n", done.stderr


def test_it_is_not_inherited_by_children(server):
    descriptor = receive_descriptor(server.name)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_visitors_who_hang_up_or_say_nothing_disturb_nobody(server):
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(f"\0{server.name}")
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(f"\0{server.name}")
    os.close(receive_descriptor(server.name))
    silent.close()


def test_a_process_short_of_descriptors_gives_it_later(monkeypatch):
    """Its limit is not lowered here: whatever else runs in this process would be short of them too."""
    refused, accept = set(), socket.socket.accept

    def refuse_once(listener):
        if listener in refused:
            return accept(listener)
        refused.add(listener)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", refuse_once)
    with no_descriptor_left():
        server = DescriptorServer(os.memfd_create("test"))
        os.close(receive_descriptor(server.name))
        server.close()
        assert len(refused) == 1
        refused.clear()


def test_another_user_gets_nothing(server, monkeypatch):
    monkeypatch.setattr(descriptor_module.os, "getuid", lambda: 12345)
    with pytest.raises(CapacityError, match="another user's process"):
        receive_descriptor(server.name)


def test_nobody_answers_after_close_and_nothing_is_left():
    with no_descriptor_left():
        server = DescriptorServer(os.memfd_create("test"))
        server.close()
        server.close()
    with pytest.raises(CapacityError, match="cannot get shared memory from its owner"):
        receive_descriptor(server.name)


def test_close_leaves_nothing_even_if_the_thread_has_ended(monkeypatch):
    monkeypatch.setattr(DescriptorServer, "_serve", lambda server: None)
    with no_descriptor_left():
        DescriptorServer(os.memfd_create("test")).close()
