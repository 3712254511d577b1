"""A pool that cannot be mapped: because expertd went away, which is waited out, or for a reason that stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.expertd import TINY, expertd
from helpers.services import Stack

from services.worker import experts
from services.worker.experts import ExpertCounters, SharedExperts
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import RecordLayout
from shared.config import PrefetchConfig
from shared.errors import CapacityError, PeerLost
from shared.memory.slab import Slab
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient

pytestmark = pytest.mark.system


def map_pool(stack: Stack) -> SharedExperts:
    client = BlockingClient(stack.config.endpoint("expertd"), make_identity("test"))
    stack.closing.callback(client.close)
    client.connect(5.0)
    return SharedExperts.open(
        client,
        fingerprint=TensorIndex.open(TINY).fingerprint,
        device="cpu",
        record_bytes=RecordLayout.of(ModelConfig.from_dir(TINY)).record_bytes,
        prefetch=PrefetchConfig(),
        counters=ExpertCounters(),
    )


@pytest.mark.parametrize("is_killed", [False, True])
def test_why_a_pool_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    with expertd(tmp_path) as stack:

        def refuse(handle: bytes, device: str) -> Slab:
            if is_killed:
                stack.kill("expertd")
            raise CapacityError("the driver cannot map it")

        monkeypatch.setattr(experts, "open_slab", refuse)
        with pytest.raises(PeerLost if is_killed else CapacityError):
            map_pool(stack)
