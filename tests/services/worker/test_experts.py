"""expertd's refusals: what ends a request, what ends the connection, and what ends the worker."""

from __future__ import annotations

from contextlib import closing
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
from shared.errors import CapacityError, ErrorCode, PeerLost, ServiceError
from shared.memory.slab import Slab
from shared.protocol.messages import ErrorReply
from shared.runtime.boot import make_identity
from shared.transport.client import BlockingClient, service_error

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


@pytest.mark.parametrize("asks", ["host", "gpu"])
@pytest.mark.parametrize("code", [ErrorCode.IO_ERROR, ErrorCode.DRAINING, ErrorCode.TIMEOUT])
def test_what_ends_a_look_up_ends_the_connection_unless_it_ended_for_expertd_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ErrorCode, asks: str
) -> None:
    refusal = ErrorReply(code.value, "no")

    def finish(self: BlockingClient, request_id: int, timeout_s: float) -> object:
        raise service_error(refusal)

    with expertd(tmp_path) as stack, closing(map_pool(stack)) as provider:
        monkeypatch.setattr(BlockingClient, "finish", finish)
        monkeypatch.setattr(BlockingClient, "poll", lambda self, timeout_s: (1, refusal))
        if asks == "gpu":
            provider.ask(0, (1,), (), 0)
        with pytest.raises(ServiceError) as raised:
            provider.look_up(0, [1]).wait() if asks == "host" else provider.take_answers()
        assert isinstance(raised.value, PeerLost) == (code is not ErrorCode.IO_ERROR)
        monkeypatch.undo()


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
