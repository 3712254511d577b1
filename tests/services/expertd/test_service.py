"""expertd as a process, asked over its socket, on a real small checkpoint."""

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import tiny_checkpoint
from helpers.expertd import TINY, Worker, expertd
from helpers.services import Stack, no_shared_memory_left, write_config

from services.expertd.service import USES_POLL_S
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.pack import pack
from shared.checkpoint.records import ExpertRecords
from shared.errors import ErrorCode, ExitCode, ServiceError
from shared.protocol.messages import (
    ClosePool,
    ExpertsFetched,
    FetchExperts,
    Generate,
    OpenPool,
    PoolClosed,
    PrefetchHint,
    StatsSnapshot,
)
from shared.stats import StatsSubscriber

SLOT_BYTES = 28672

pytestmark = pytest.mark.system


def snapshot_of(stack: Stack) -> StatsSnapshot:
    """Made after this call: a subscriber gets only what is published later."""
    subscriber = StatsSubscriber([stack.config.endpoint("expertd.stats")])
    try:
        snapshot = subscriber.poll(5.0)
        assert snapshot is not None
        return snapshot
    finally:
        subscriber.close()


def stats(stack: Stack) -> dict[str, float]:
    return snapshot_of(stack).values


def test_records_arrive_are_evicted_and_arrive_again(tmp_path):
    with expertd(tmp_path, cache={"bytes": 8 * SLOT_BYTES}) as stack:
        worker = Worker(stack)
        worker.open()
        for _ in range(2):
            for layer in range(7):
                assert worker.fetch(layer, 1, 5, 11, 15) == ExpertsFetched()
                for expert in (1, 5, 11, 15):
                    worker.check(layer, expert)
        values = stats(stack)
        assert values["misses"] == 56
        assert values["evictions"] == 48
        assert values["slots_resident"] == 8
        assert values["bytes_read"] >= 56 * worker.records.layout.record_bytes


def test_hints_are_read_ahead_and_a_resident_expert_is_answered_at_once(tmp_path):
    with expertd(tmp_path) as stack:
        worker = Worker(stack)
        worker.open()
        worker.client.send(PrefetchHint(2, (3, 4)))
        while (worker.control.slot_table[2, [3, 4]] < 0).any():
            assert worker.client.poll(0.01) is None
        worker.fetch(2, 3, 4)
        worker.check(2, 3)
        values = stats(stack)
        assert (values["misses"], values["late_hits"], values["prefetched"]) == (0, 2, 2)


def test_the_picture_shows_what_is_resident_and_hot(tmp_path):
    with expertd(tmp_path) as stack:
        worker = Worker(stack)
        worker.open()
        worker.fetch(3, 2, 7)
        worker.control.uses[3, 2] += 3
        picture = np.frombuffer(snapshot_of(stack).picture, np.uint8).reshape(7, 16)
    assert np.argwhere(picture >= 128).tolist() == [[3, 2], [3, 7]]
    assert np.argwhere(picture & 127).tolist() == [[3, 2]]


def test_a_second_worker_another_checkpoint_and_strangers_are_refused(tmp_path):
    with expertd(tmp_path) as stack:
        worker, other = Worker(stack), Worker(stack)
        with pytest.raises(ServiceError, match="open the pool first"):
            worker.fetch(0, 1)
        with pytest.raises(ServiceError, match="another checkpoint"):
            worker.client.call(OpenPool("something else", "cpu"), 5.0)
        worker.open()
        with pytest.raises(ServiceError, match=r"another worker, connection [0-9a-f]+, holds the pool") as refusal:
            other.open()
        assert refusal.value.code is ErrorCode.NO_CAPACITY
        with pytest.raises(ServiceError, match="expert 16 is not one of 16"):
            worker.fetch(0, 16)
        with pytest.raises(ServiceError, match="layer 7 is not one of 7"):
            worker.fetch(7, 0)
        with pytest.raises(ServiceError, match="Generate"):
            worker.client.call(Generate((1,), 1), 5.0)
        assert worker.client.call(ClosePool(), 5.0) == PoolClosed()
        other.open()


def test_a_dead_workers_pins_vanish_and_the_cache_stays(tmp_path):
    with expertd(tmp_path, cache={"bytes": 8 * SLOT_BYTES}) as stack:
        worker = Worker(stack)
        worker.open()
        worker.control.busy = True
        worker.fetch(0, 0, 1, 2, 3, clock=10**6)
        worker.client.close()
        heir = Worker(stack)
        while not heir.can_open():
            pass
        heir.check(0, 3)
        heir.fetch(1, 0, 1, 2, 3)
        heir.fetch(2, 0, 1, 2, 3)
        heir.check(2, 0)


def copy_of_tiny(tmp_path: Path) -> Path:
    target = tmp_path / "checkpoint"
    shutil.copytree(TINY, target, ignore=shutil.ignore_patterns("*golden*"))
    return target


def test_a_truncated_shard_fails_its_reads_and_nothing_else(tmp_path):
    checkpoint = copy_of_tiny(tmp_path)
    with expertd(tmp_path, checkpoint) as stack:
        worker = Worker(stack, checkpoint)
        worker.open()
        whole, broken = (
            next(layer for layer in range(7) if worker.records.plan(layer, 0).extents[0].file.name == name)
            for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        )
        worker.fetch(broken, 0)
        shard = checkpoint / "model-00002-of-00002.safetensors"
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)
        with pytest.raises(ServiceError, match=r"model-00002-of-00002\.safetensors") as failure:
            worker.fetch(broken, 0, 1, 2)
        assert failure.value.code is ErrorCode.IO_ERROR
        worker.fetch(whole, 4, 5)
        worker.check(whole, 5)
        assert stats(stack)["read_errors"] >= 1


def test_heat_warms_the_next_start(tmp_path):
    sections = {"cache": {"bytes": 8 * SLOT_BYTES, "save_heat": True}}
    with expertd(tmp_path, **sections) as stack:
        worker = Worker(stack)
        worker.open()
        for _ in range(5):
            worker.fetch(3, 7, 9)
        assert stack.terminate("expertd") == ExitCode.OK
        stack.start("expertd")
        stack.wait_ready("expertd")
        worker = Worker(stack)
        worker.open()
        worker.check(3, 7)
        worker.check(3, 9)


def test_killed_and_started_again_at_once(tmp_path):
    with no_shared_memory_left(), expertd(tmp_path) as stack:
        Worker(stack).open()
        stack.kill("expertd")
        stack.start("expertd")
        stack.wait_ready("expertd")
        worker = Worker(stack)
        worker.open()
        worker.fetch(0, 0)
        worker.check(0, 0)


@pytest.mark.parametrize(
    ("sections", "damage", "message"),
    [
        ({"cache": {"bytes": 7 * SLOT_BYTES}}, None, f"at least {8 * SLOT_BYTES:,}"),
        ({"worker": {"device": "cuda:99"}}, None, 'worker.device is "cuda:99", but there is no such NVIDIA GPU'),
        ({}, "model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors"),
        ({}, "config.json", "config.json"),
    ],
)
def test_what_cannot_work_is_refused_at_start_with_what_would(tmp_path, sections, damage, message):
    checkpoint = copy_of_tiny(tmp_path)
    if damage:
        (checkpoint / damage).unlink()
    stack = Stack(write_config(tmp_path / "icebox.toml", checkpoint, **sections))
    stack.start("expertd")
    assert stack.processes["expertd"].wait(20) == ExitCode.CONFIG
    assert message in stack.log("expertd")
    assert "Traceback" not in stack.log("expertd")


def test_sigterm_during_reads_ends_with_zero(tmp_path):
    with expertd(tmp_path, cache={"bytes": 8 * SLOT_BYTES}, reader={"threads": 8}) as stack:
        worker = Worker(stack)
        worker.open()
        for layer in range(7):
            worker.client.start(FetchExperts(layer, tuple(range(4)), layer))
        stack.processes["expertd"].send_signal(signal.SIGTERM)
        assert stack.processes["expertd"].wait(4.0) == ExitCode.OK


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (FetchExperts(0, (1, 1), 0), "names an expert twice"),
        (FetchExperts(0, (0, 1, 2, 3, 4), 0), "a look-up of 5 experts; this pool allows 4"),
        (FetchExperts(0, (0, 1, 2), 0, held_slots=(0, 1)), "a look-up of 5 experts; this pool allows 4"),
        (FetchExperts(-1, (0,), 0), "layer -1 is not one of 7"),
        (FetchExperts(0, (-1,), 0), "expert -1 is not one of 16"),
    ],
)
def test_look_ups_that_could_never_end_are_refused_and_the_next_one_works(tmp_path, message, problem):
    with expertd(tmp_path, cache={"bytes": 8 * SLOT_BYTES}) as stack:
        worker = Worker(stack)
        worker.open()
        with pytest.raises(ServiceError, match=problem) as refusal:
            worker.client.call(message, 5.0)
        assert refusal.value.code is ErrorCode.BAD_REQUEST
        worker.fetch(0, 0, 1, 2, 3)
        worker.check(0, 3)


def test_hints_with_wrong_ids_change_nothing(tmp_path):
    with expertd(tmp_path) as stack:
        worker = Worker(stack)
        worker.open()
        worker.client.send(PrefetchHint(9, (0,)))
        worker.client.send(PrefetchHint(0, (99,)))
        worker.fetch(0, 0)
        assert stats(stack)["prefetched"] == 0


def test_the_statistics_are_the_documented_ones_and_add_up(tmp_path):
    with expertd(tmp_path) as stack:
        worker = Worker(stack)
        worker.open()
        for layer, ids in ((0, (1, 2, 3)), (6, (15,))):
            worker.control.uses[layer, list(ids)] += 1
            worker.fetch(layer, *ids)
        worker.control.uses[0, [1, 2]] += 1
        snapshot = snapshot_of(stack)
        values = snapshot.values
        keys = [
            "uses",
            "misses",
            "late_hits",
            "prefetched",
            "evictions",
            "bytes_read",
            "read_errors",
            "io_seconds",
            "queue_demand",
            "queue_prefetch",
            "in_flight",
            "slots_total",
            "slots_resident",
            "slots_free",
            "slots_retired",
            "record_bytes",
            "moe_layers",
            "backbone_layers",
            "experts",
        ]
        assert set(keys) <= values.keys()
        assert {f"{kind}.{layer}" for kind in ("heat", "uses", "misses") for layer in range(7)} <= values.keys()
        assert {"policy", "direct", "checkpoint"} <= snapshot.labels.keys()
        assert (values["uses"], values["misses"], values["late_hits"]) == (6, 4, 0)
        assert [values[f"uses.{layer}"] for layer in range(7)] == [5, 0, 0, 0, 0, 0, 1]
        assert [values[f"misses.{layer}"] for layer in range(7)] == [3, 0, 0, 0, 0, 0, 1]
        assert [values[f"heat.{layer}"] for layer in range(7)] == [3, 0, 0, 0, 0, 0, 1]
        assert values["slots_resident"] + values["slots_free"] + values["slots_retired"] == values["slots_total"]
        assert (values["moe_layers"], values["backbone_layers"], values["experts"]) == (7, 6, 16)
        assert values["record_bytes"] == worker.records.layout.record_bytes


def test_uses_that_cost_no_message_decide_what_stays(tmp_path):
    """Favourites are only ever found in the table; a stream of others must not push them out."""
    with expertd(tmp_path, cache={"bytes": 16 * SLOT_BYTES, "policy": "lfu"}) as stack:
        worker = Worker(stack)
        worker.open()
        worker.fetch(0, 1, 2, 3, 4)
        worker.control.uses[0, [1, 2, 3, 4]] += 20
        time.sleep(5 * USES_POLL_S)
        for layer in range(1, 7):
            for first in range(0, 16, 4):
                worker.control.uses[layer, first : first + 4] += 1
                worker.fetch(layer, *range(first, first + 4))
        assert (worker.control.slot_table[0, 1:5] >= 0).all()
        for expert in (1, 2, 3, 4):
            worker.check(0, expert)


def test_a_pool_for_the_whole_backbone_comes_to_rest_with_everything_in_it(tmp_path):
    with expertd(tmp_path, cache={"bytes": 6 * 16 * SLOT_BYTES}) as stack:
        worker = Worker(stack)
        worker.open()
        for layer in range(6):
            for first in range(0, 16, 4):
                worker.fetch(layer, *range(first, first + 4))
        for layer in range(6):
            for expert in range(16):
                worker.check(layer, expert)


def test_closing_the_pool_ends_what_the_worker_still_waits_for(tmp_path):
    """Every look-up asked for gets its one answer, whether it was read in time or not."""
    with expertd(tmp_path, cache={"bytes": 8 * SLOT_BYTES}, reader={"threads": 1}) as stack:
        worker = Worker(stack)
        worker.open()
        asked = {worker.client.start(FetchExperts(layer, (0, 1, 2, 3), 0, is_ahead=True)) for layer in range(7)}
        closing = worker.client.start(ClosePool())
        answers = dict(worker.client.poll(5.0) for _ in range(8))
        assert answers.pop(closing) == PoolClosed()
        assert answers.keys() == asked
        assert all(isinstance(a, ExpertsFetched) or a.code == ErrorCode.CANCELLED for a in answers.values())
        worker.open()
        worker.fetch(0, 5)
        worker.check(0, 5)


def test_a_hot_expert_that_cannot_be_read_does_not_stop_the_start(tmp_path):
    checkpoint = tmp_path / "packed"
    pack(tiny_checkpoint(), checkpoint)
    index, config = TensorIndex.open(checkpoint), ModelConfig.from_dir(checkpoint)
    extent = ExpertRecords(index, config).plan(3, 2).extents[0]
    with extent.file.open("r+b") as file:
        file.seek(extent.offset + 1000)
        byte = file.read(1)[0]
        file.seek(extent.offset + 1000)
        file.write(bytes([byte ^ 1]))
    heat = tmp_path / "run" / "heat.json"
    heat.parent.mkdir(mode=0o700)
    heat.write_text(json.dumps({"fingerprint": index.fingerprint, "uses": [[3, 2, 9], [0, 1, 9], [4, 0, 9]]}))
    with expertd(tmp_path, checkpoint, cache={"save_heat": True}, reader={"verify": True}) as stack:
        worker = Worker(stack, checkpoint)
        worker.open()
        worker.check(0, 1)
        worker.check(4, 0)
        assert worker.control.slot_table[3, 2] == -1
        with pytest.raises(ServiceError, match=r"layers\.3\.ffn\.experts\.2 is damaged"):
            worker.fetch(3, 2)


def test_damaged_and_foreign_heat_is_a_line_in_the_log(tmp_path):
    sections = {"cache": {"bytes": 8 * SLOT_BYTES, "save_heat": True}}
    heat = tmp_path / "run" / "heat.json"
    heat.parent.mkdir(mode=0o700)
    for content, line in ((b"{", "damaged heat ignored"), (b'{"fingerprint": "x", "uses": []}', "another checkpoint")):
        heat.write_bytes(content)
        with expertd(tmp_path, **sections) as stack:
            assert stack.log("expertd").count(line) == 1
            assert stack.terminate("expertd") == ExitCode.OK
            heat_after = json.loads(heat.read_text())
            assert heat_after["uses"] == []


def test_two_services_cannot_share_a_run_directory(tmp_path):
    with expertd(tmp_path) as stack:
        pid = stack.processes["expertd"].pid
        second = Stack(stack.config_path)
        second.start("expertd")
        assert second.processes["expertd"].wait(20) == ExitCode.LOCKED
        assert str(pid) in stack.log("expertd")
        worker = Worker(stack)
        worker.open()
        worker.fetch(0, 0)
