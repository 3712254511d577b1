"""expertd with its pool on a GPU, as a process, and the worker's side of that pool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers.expertd import Worker, expertd
from helpers.gpu import eventually
from helpers.services import Stack

from shared.checkpoint.synth import SynthOptions, synthesise
from shared.config import PrefetchConfig
from shared.cuda.device import Device
from shared.errors import ExitCode, PeerLost
from shared.memory.cuda_slab import CudaSlab
from shared.protocol.messages import ClosePool, ExpertsFetched, FetchExperts, PoolClosed
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient

SLOT_BYTES = 28672
ON_GPU = {"worker": {"device": "cuda"}}
SLACK = 128 << 20


def test_records_arrive_are_evicted_and_arrive_again(tmp_path: Path, device: Device) -> None:
    with expertd(tmp_path, cache={"bytes": 8 * SLOT_BYTES}, **ON_GPU) as stack:
        worker = Worker(stack)
        worker.open()
        assert isinstance(worker.slab, CudaSlab)
        for _ in range(3):
            for layer in range(7):
                assert worker.fetch(layer, 1, 5, 11, 15) == ExpertsFetched()
                for expert in (1, 5, 11, 15):
                    worker.check(layer, expert)
        worker.slab.close()
        assert stack.terminate("expertd") == ExitCode.OK


def test_what_the_table_says_is_always_there_under_load(tmp_path: Path, device: Device) -> None:
    """Look-ups and fetches ahead by the dozen, as in prefill, on records of 100 KB; every hit is looked at."""
    checkpoint = tmp_path / "checkpoint"
    synthesise(checkpoint, SynthOptions("small", 5, 32))
    rng = random.Random(1)
    with expertd(tmp_path, checkpoint, cache={"bytes": "16 MiB"}, reader={"threads": 8}, **ON_GPU) as stack:
        worker = Worker(stack, checkpoint)
        worker.open()
        assert worker.pool is not None
        layers, experts = worker.control.slot_table.shape
        size = min(worker.pool.wave_experts, experts, 8)
        worker.control.busy = True
        for _ in range(40):
            layer, clock = rng.randrange(layers), worker.control.worker_clock
            wave, ahead = sorted(rng.sample(range(experts), size)), rng.sample(range(experts), size)
            held = worker.look_up(layer, wave)
            missing = tuple(expert for expert in wave if expert not in held)
            look_up = FetchExperts(layer, missing, clock, tuple(held.values()))
            ticket = worker.client.start(look_up) if missing else None
            worker.client.forget(worker.client.start(FetchExperts(layer, tuple(ahead), clock + 1, is_ahead=True)))
            if ticket is not None:
                assert worker.client.finish(ticket, 10.0) == ExpertsFetched()
                held |= worker.look_up(layer, missing)
            assert len(held) == len(wave)
            for expert, slot in held.items():
                worker.check_slot(slot, layer, expert)
            worker.control.uses[layer, wave] += 1
            worker.control.worker_clock += 1
        worker.slab.close()


def shared_experts(stack: Stack, worker: Worker) -> tuple[BlockingClient, object]:
    from services.worker.experts import ExpertCounters, SharedExperts

    client = BlockingClient(stack.config.endpoint("expertd"), make_identity("test"))
    stack.closing.callback(client.close)
    client.connect(5.0)
    experts = SharedExperts.open(
        client,
        fingerprint=worker.index.fingerprint,
        device="cuda",
        record_bytes=worker.records.layout.record_bytes,
        prefetch=PrefetchConfig(),
        counters=ExpertCounters(),
    )
    return client, experts


def until_lost(client: BlockingClient) -> None:
    for _ in range(20):
        client.poll(1.0)


def test_the_workers_records_are_tensors_on_the_gpu(tmp_path: Path, device: Device) -> None:
    torch = pytest.importorskip("torch")
    with expertd(tmp_path, **ON_GPU) as stack:
        worker = Worker(stack)
        _, experts = shared_experts(stack, worker)
        with experts.step():
            for is_hit in (False, True):
                look_up = experts.look_up(3, [2, 7])
                assert len(look_up.hits) == (2 if is_hit else 0)
                for expert, record in (dict(look_up.hits) | dict(look_up.wait())).items():
                    expected = bytearray(worker.records.layout.record_bytes)
                    worker.records.read_record(3, expert, memoryview(expected))
                    assert (record.device.type, record.dtype) == ("cuda", torch.uint8)
                    assert record.cpu().numpy().tobytes() == bytes(expected)
                look_up.done()
        assert experts.pool.is_cuda
        slots = experts.control.slot_table[3, [2, 7]].tolist()
        assert experts.pool[slots[1], : len(expected)].cpu().numpy().tobytes() == bytes(expected)
        experts.close()


def test_kernels_read_the_slot_table_and_write_the_clock(tmp_path: Path, device: Device) -> None:
    torch = pytest.importorskip("torch")
    from services.worker.device_memory import device_tensor

    with expertd(tmp_path, **ON_GPU) as stack:
        worker = Worker(stack)
        _, experts = shared_experts(stack, worker)
        at, shape = experts.control_addresses, experts.control.slot_table.shape
        table = device_tensor(at.slot_table, shape, torch.int32, "cuda")
        clock = device_tensor(at.worker_clock, (1,), torch.int64, "cuda")
        look_up = experts.look_up(6, [0, 15])
        look_up.wait()
        torch.cuda.synchronize()
        assert (table >= 0).nonzero().tolist() == [[6, 0], [6, 15]]
        clock += 41
        torch.cuda.synchronize()
        assert experts.control.worker_clock == 41
        del table, clock
        experts.close()


def test_a_worker_that_loses_expertd_gives_the_memory_back(tmp_path: Path, device: Device) -> None:
    pytest.importorskip("torch").zeros(1, device="cuda")
    before = device.memory().free
    with expertd(tmp_path, **ON_GPU) as stack:
        worker = Worker(stack)
        client, experts = shared_experts(stack, worker)
        experts.look_up(0, [1]).wait()
        stack.kill("expertd")
        with pytest.raises(PeerLost):
            until_lost(client)
        experts.close()
    eventually(
        lambda: before - device.memory().free < SLACK,
        lambda: f"free before {before:,}, after {device.memory().free:,}",
    )


def test_an_expertd_whose_worker_was_killed_serves_the_next_and_leaves_nothing(tmp_path: Path, device: Device) -> None:
    before = device.memory().free
    with expertd(tmp_path, **ON_GPU) as stack:
        worker = Worker(stack)
        worker.open()
        worker.fetch(2, 3)
        worker.client.close()  # as its death would
        worker.slab.close()
        heir = Worker(stack)
        while not heir.can_open():
            pass
        heir.check(2, 3)
        heir.fetch(2, 4)
        heir.check(2, 4)
        assert heir.client.call(ClosePool(), 5.0) == PoolClosed()
        heir.slab.close()
        assert stack.terminate("expertd") == ExitCode.OK
    eventually(
        lambda: before - device.memory().free < SLACK,
        lambda: f"free before {before:,}, after {device.memory().free:,}",
    )
