"""Shared memory between real processes: the same bytes, no names, nothing left behind, clear errors."""

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
from helpers.descriptors import no_descriptor_left

from shared.errors import CapacityError, ProtocolError
from shared.memory.slab import create_slab, open_slab

ROOT = Path(__file__).resolve().parents[3]
NBYTES = 3 * 4096 + 5

# Maps the slab named by its argument, adds one to every byte, and then does what it is told on its input.
PEER = """
import sys
from shared.memory.slab import open_slab
slab = open_slab(bytes.fromhex(sys.argv[1]), "cpu")
view = slab.view()
view += 1
print("mapped", flush=True)
sys.stdin.readline()
print(int(view.sum()), flush=True)
"""

# Creates a slab full of sevens, tells its handle, and waits to be killed.
OWNER = """
import sys
from shared.memory.slab import create_slab
slab = create_slab(int(sys.argv[1]), "cpu")
slab.view()[:] = 7
print(slab.handle().hex(), flush=True)
sys.stdin.readline()
"""


def start(code: str, argument: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, argument], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def slab():
    slab = create_slab(NBYTES, "cpu")
    yield slab
    slab.close()


def test_a_new_slab_is_zeroed_and_writable(slab):
    view = slab.view()
    assert (view.dtype, view.shape, slab.nbytes) == (np.uint8, (NBYTES,), NBYTES)
    assert not view.any()
    view[-1] = 9
    assert slab.view()[-1] == 9


def test_another_process_sees_and_writes_the_same_bytes(slab):
    slab.view()[:] = 4
    with start(PEER, slab.handle().hex()) as peer:
        assert line(peer) == "mapped"
        assert (slab.view() == 5).all()
        slab.view()[0] = 15
        peer.communicate("go on\n")
    assert peer.returncode == 0


def test_the_mapping_outlives_an_owner_that_is_killed():
    with start(OWNER, str(NBYTES)) as owner:
        slab = open_slab(bytes.fromhex(line(owner)), "cpu")
        owner.kill()
        owner.wait()
    assert (slab.view() == 7).all()
    slab.close()


def test_a_slab_has_no_name_anywhere(slab):
    before = set(os.listdir("/dev/shm"))
    other = create_slab(NBYTES, "cpu")
    assert set(os.listdir("/dev/shm")) == before
    other.close()


def test_closing_twice_is_harmless_and_frees_the_descriptor():
    with no_descriptor_left():
        slab = create_slab(NBYTES, "cpu")
        peer = open_slab(slab.handle(), "cpu")
        for end in (peer, slab, peer, slab):
            end.close()


def test_a_view_that_somebody_still_holds_does_not_stop_closing():
    slab = create_slab(NBYTES, "cpu")
    view = slab.view()
    slab.close()
    view[:] = 1
    assert view.sum() == NBYTES


def test_memory_that_is_not_there_is_refused_at_once():
    with no_descriptor_left(), pytest.raises(CapacityError, match=r"cannot allocate 1,152,921,504,606,846,976 bytes"):
        create_slab(1 << 60, "cpu")


def test_an_owner_that_is_gone_is_named():
    with start(OWNER, str(NBYTES)) as owner:
        handle = bytes.fromhex(line(owner))
        owner.kill()
        owner.wait()
    with pytest.raises(CapacityError, match=rf"cannot open shared memory /proc/{owner.pid}/fd/\d+"):
        open_slab(handle, "cpu")


def test_a_handle_of_another_size_is_refused(slab):
    kind, pid, descriptor, nbytes = msgpack.unpackb(slab.handle())
    with pytest.raises(CapacityError, match="is not the"):
        open_slab(msgpack.packb([kind, pid, descriptor, nbytes + 1]), "cpu")


@pytest.mark.parametrize(
    "handle",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgpack.packb(7),
        msgpack.packb([]),
        msgpack.packb(["tape", 1, 2, 3]),
        msgpack.packb(["cuda-ipc", 1, 2, 3]),
        msgpack.packb(["cuda-ipc", b"short", 2, bytes(64)]),
        msgpack.packb(["cuda-vmm", bytes(16), 0, "name", 2]),
        msgpack.packb(["memfd", 1, 2]),
        msgpack.packb(["memfd", 1, 2, 3, 4]),
        msgpack.packb(["memfd", "../../etc", 2, 3]),
        msgpack.packb(["memfd", 1, "passwd", 3]),
        msgpack.packb(["memfd", 1, 2, None]),
        msgpack.packb(["memfd", -1, 2, 3]),
        msgpack.packb(["memfd", 1, 2, 0]),
    ],
)
def test_garbage_is_no_handle(handle):
    with pytest.raises(ProtocolError, match="slab handle"):
        open_slab(handle, "cpu")
