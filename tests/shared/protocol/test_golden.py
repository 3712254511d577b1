"""The bytes of every message, as recorded: a change of the wire format fails here, and must be meant."""

from __future__ import annotations

import pytest
from helpers.messages import EXAMPLES

from shared.protocol import messages
from shared.protocol.codec import decode, encode, registered

GOLDEN = {
    "Hello": "940101a6776f726b6572a430306666",
    "Welcome": "940201a765787065727464a430306666",
    "Ping": "9103",
    "Pong": "9904a566726f6e74a430306666a57265616479ad73686172642033206f66203438cd1267cb3ff80000000000000710",
    "ErrorReply": "9305a8696f5f6572726f72bb6c6179657220333a20496e7075742f6f7574707574206572726f72",
    "Cancel": "9206cf8000000000000000",
    "Generate": "9b10930001ce0001f8ff10cb3fe0000000000000cb3fd000000000000028cb3fc000000000000007920102ff920203",
    "TokensGenerated": "9b11920506a473746f70030201cb3fd0000000000000cb3fe0000000000000909090",
    "OpenPool": "9320a3616263a3637075",
    "PoolOpened": "9721a430306666c4020063c4027330cd10006419",
    "FetchExperts": "96222a930011ccffcf000001000000000090c2",
    "ExpertsFetched": "9123",
    "PrefetchHint": "9424019103c2",
    "ClosePool": "9125",
    "PoolClosed": "9126",
    "Chat": "9930d9205b7b22726f6c65223a2275736572222c22636f6e74656e74223a22c3bc227d5d08cb3fe8000000000000cb3f"
    "e000000000000003cb3fd0000000000000ffb17b227468696e6b696e67223a747275657d",
    "TextChunk": "9a31a24869a2686da25b5da0030201cb3fd0000000000000cb3fe0000000000000",
    "StatsSnapshot": "9740a765787065727464a430306666cb408f44000000000081a66d6973736573cb400800000000000081a6706f6c6963"
    "79a86c66752d61676564c402807f",
}


@pytest.mark.parametrize("msg", EXAMPLES, ids=lambda msg: type(msg).__name__)
def test_bytes(msg: object) -> None:
    recorded = bytes.fromhex(GOLDEN[type(msg).__name__])
    assert encode(msg) == recorded
    assert decode(recorded) == msg


def test_every_message_is_recorded_under_its_tag() -> None:
    ours = {spec.cls.__name__: spec.tag for spec in registered() if spec.cls.__module__ == messages.__name__}
    assert {name: bytes.fromhex(data)[1] for name, data in GOLDEN.items()} == ours
