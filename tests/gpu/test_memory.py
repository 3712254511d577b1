"""GPU memory between processes: the same bytes on both sides, on the right GPU, and nothing left behind by a kill."""

from __future__ import annotations

import os

import msgpack
import pytest
from helpers.gpu import eventually, line, read_gpu, start, write_gpu

from shared.cuda.device import Device
from shared.cuda.driver import call
from shared.cuda.host_memory import Registration
from shared.errors import CapacityError, ConfigError, DeviceError, ProtocolError
from shared.memory import cuda_ipc, cuda_vmm
from shared.memory.control_block import NO_SLOT, ControlBlock
from shared.memory.cuda import KINDS, Kind
from shared.memory.slab import create_slab, open_slab

GIB = 1 << 30
# What the driver may keep of its own, and does not give back at once.
SLACK = 128 << 20
NBYTES = 5 * (1 << 20) + 4096

# Opens the slab named by its argument, says what it begins and ends with, writes there, and waits.
PEER = """
import sys
from shared.memory.slab import open_slab
from helpers.gpu import read_gpu, write_gpu
slab = open_slab(bytes.fromhex(sys.argv[1]), "cuda")
print(read_gpu(slab.address, 4).hex(), read_gpu(slab.address + slab.nbytes - 4, 4).hex(), flush=True)
write_gpu(slab.address + slab.nbytes - 4, b"peer")
print("written", flush=True)
sys.stdin.readline()
slab.close()
"""

# Creates a slab of the kind and size that its arguments name, tells its handle, and waits to be killed.
OWNER = """
import sys
from shared.cuda.device import Device
from shared.memory.cuda import KINDS
from helpers.gpu import write_gpu
slab = KINDS[sys.argv[1]].create(Device.named("cuda"), int(sys.argv[2]))
write_gpu(slab.address, b"mine")
print(slab.handle().hex(), flush=True)
sys.stdin.readline()
"""

PATHS = "import sys; sys.path[:0] = ['.', 'tests']\n"


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest, device: Device) -> Kind:
    kind = KINDS[request.param]
    if not kind.is_supported(device):
        pytest.skip(f"this GPU does not share memory by {request.param}")
    return kind


def test_two_processes_see_each_others_writes(kind: Kind, device: Device) -> None:
    slab = kind.create(device, NBYTES)
    write_gpu(slab.address, b"head")
    write_gpu(slab.address + NBYTES - 4, b"tail")
    with start(PATHS + PEER, slab.handle().hex()) as peer:
        assert line(peer) == f"{b'head'.hex()} {b'tail'.hex()}"
        assert line(peer) == "written"
        assert read_gpu(slab.address + NBYTES - 4, 4) == b"peer"
        peer.communicate("go on\n")
    assert peer.returncode == 0
    slab.close()
    slab.close()


def test_a_killed_owners_memory_lives_until_the_peer_lets_go(kind: Kind, device: Device) -> None:
    before = device.memory().free
    with start(PATHS + OWNER, kind.KIND, str(GIB)) as owner:
        slab = open_slab(bytes.fromhex(line(owner)), "cuda")
        owner.kill()
    eventually(
        lambda: abs(before - GIB - device.memory().free) < SLACK,
        lambda: f"free before {before:,}, with the slab of a dead owner {device.memory().free:,}",
    )
    assert read_gpu(slab.address, 4) == b"mine"
    slab.close()
    eventually(
        lambda: before - device.memory().free < SLACK,
        lambda: f"free before {before:,}, after the peer closed {device.memory().free:,}",
    )


def test_a_killed_peer_holds_nothing_back(kind: Kind, device: Device) -> None:
    before = device.memory().free
    slab = kind.create(device, GIB)
    with start(PATHS + PEER, slab.handle().hex()) as peer:
        line(peer)
        assert line(peer) == "written"
        peer.kill()
    assert read_gpu(slab.address + GIB - 4, 4) == b"peer"
    slab.close()
    eventually(
        lambda: before - device.memory().free < SLACK,
        lambda: f"free before {before:,}, after the owner closed {device.memory().free:,}",
    )


def test_an_owner_that_is_gone_is_an_error_and_no_crash(kind: Kind) -> None:
    with start(PATHS + OWNER, kind.KIND, str(NBYTES)) as owner:
        handle = bytes.fromhex(line(owner))
        owner.kill()
    with pytest.raises(CapacityError, match="cannot"):
        open_slab(handle, "cuda")


def test_a_slab_on_another_gpu_is_refused_by_name(kind: Kind, device: Device) -> None:
    slab = kind.create(device, NBYTES)
    name, _, *rest = msgpack.unpackb(slab.handle())
    with pytest.raises(ConfigError, match=r"GPU 01010101-.*CUDA_VISIBLE_DEVICES"):
        open_slab(msgpack.packb([name, b"\1" * 16, *rest]), "cuda")
    with pytest.raises(ConfigError, match=r'worker\.device = "cpu"'):
        open_slab(slab.handle(), "cpu")
    slab.close()


@pytest.mark.parametrize("fields", [[], [b"short"], [7], ["no-such-name", -1], ["x", "y"]])
def test_garbage_behind_the_right_gpu_is_no_handle(kind: Kind, device: Device, fields: list[object]) -> None:
    with pytest.raises(ProtocolError, match="slab handle"):
        open_slab(msgpack.packb([kind.KIND, device.uuid.bytes, NBYTES, *fields]), "cuda")


def test_closing_leaves_no_descriptor_and_no_memory(kind: Kind, device: Device) -> None:
    kind.create(device, NBYTES).close()
    before, descriptors = device.memory().free, len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        kind.create(device, GIB).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert before - device.memory().free < SLACK


def test_more_than_there_is_is_refused_with_what_there_is(device: Device) -> None:
    with pytest.raises(CapacityError, match=r"cannot allocate 1,125,899,906,842,624 bytes of GPU memory.* are free"):
        create_slab(1 << 50, "cuda")


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'worker\.device = "cuda:99", but CUDA shows \d+ GPU'):
        create_slab(NBYTES, "cuda:99")


def test_the_kind_is_chosen_and_logged(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        slab = create_slab(NBYTES, "cuda:0")
    assert f"gpu={device.uuid}" in caplog.text
    slab.close()


def test_the_second_kind_serves_where_the_first_cannot(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("cuIpcGetMemHandle", "CUDA_ERROR_NOT_SUPPORTED")

    if not cuda_vmm.is_supported(device):
        pytest.skip("this GPU has one kind only")
    monkeypatch.setattr(cuda_ipc, "create", fail)
    slab = create_slab(NBYTES, "cuda")
    assert msgpack.unpackb(slab.handle())[0] == cuda_vmm.KIND
    slab.close()
    monkeypatch.setattr(cuda_vmm, "is_supported", lambda device: False)
    with pytest.raises(CapacityError, match=r"cannot share memory.*CUDA_ERROR_NOT_SUPPORTED.*cuda-vmm: not supported"):
        create_slab(NBYTES, "cuda")


def test_gpu_and_host_see_each_others_writes_in_the_control_block(device: Device) -> None:
    block = ControlBlock.create(43, 256)
    registration = Registration(device, block.address, block.nbytes)
    at = block.addresses(registration.device_address)
    slab = create_slab(block.slot_table.nbytes, "cuda")
    block.slot_table[42, 255] = 77
    call("cuMemcpyDtoD", slab.address, at.slot_table, block.slot_table.nbytes)
    assert read_gpu(slab.address, block.slot_table.nbytes) == block.slot_table.tobytes()
    for address, value, words in (
        (at.worker_clock, 5, 1),
        (at.abort, 1, 1),
        (at.ticket_head, 3, 1),
        (at.tickets, 9, 64),
    ):
        call("cuMemsetD32", address, value, words)
    device.synchronize()
    assert (block.worker_clock, block.abort, block.ticket_head) == (5, True, 3)
    assert (block.tickets[0] == 9).all()
    assert not block.tickets[1:].any()
    assert (block.slot_table == NO_SLOT).sum() == 43 * 256 - 1
    slab.close()
    registration.close()
    registration.close()
    block.close()


def test_the_same_pages_can_be_registered_again_once_they_are_let_go(device: Device) -> None:
    block = ControlBlock.create(7, 16)
    for _ in range(3):
        registration = Registration(device, block.address, block.nbytes)
        with pytest.raises(CapacityError, match="cannot pin"):
            Registration(device, block.address, block.nbytes)
        registration.close()
    block.close()
