"""Encoding and decoding: what goes in comes out, and nothing but a message ever does."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import pytest
from helpers.messages import EXAMPLES
from hypothesis import example, given
from hypothesis import strategies as st

from shared.errors import ProtocolError
from shared.protocol.codec import check_registry, decode, encode, is_final, message, registered, spec_of
from shared.protocol.messages import (
    Chat,
    ErrorReply,
    ExpertsFetched,
    FetchExperts,
    Generate,
    Hello,
    Pong,
    StatsSnapshot,
    TextChunk,
)

INTS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False) | INTS
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": INTS,
    "float": FLOATS,
    "str": TEXT,
    "bool": st.booleans(),
    "bytes": st.binary(),
    "tuple[int, ...]": st.lists(INTS).map(tuple),
    "tuple[float, ...]": st.lists(FLOATS).map(tuple),
    "tuple[str, ...]": st.lists(TEXT).map(tuple),
    "tuple[bytes, ...]": st.lists(st.binary()).map(tuple),
    "dict[str, float]": st.dictionaries(TEXT, FLOATS),
    "dict[str, str]": st.dictionaries(TEXT, TEXT),
}


@message(250)
class AllTypes:
    """Every field type that there is."""

    i: int
    f: float
    s: str
    b: bool
    raw: bytes
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    strs: tuple[str, ...]
    blobs: tuple[bytes, ...]
    numbers: dict[str, float]
    labels: dict[str, str]


def any_of(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{f.name: VALUES[f.type] for f in dataclasses.fields(cls)})


ANY_MESSAGE = st.one_of([any_of(spec.cls) for spec in registered()])


@given(ANY_MESSAGE)
def test_round_trip(msg: object) -> None:
    again = decode(encode(msg))
    assert again == msg
    assert type(again) is type(msg)
    assert encode(again) == encode(msg)


def decodes_or_refuses(data: bytes) -> None:
    try:
        msg = decode(data)
    except ProtocolError:
        return
    assert spec_of(msg)
    assert decode(encode(msg)) == msg or "nan" in repr(msg)


@given(st.binary())
@example(b"")
@example(b"\x91\x03\x00")
@example(b"\x91" * 5000 + b"\x00")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdb\xff\xff\xff\xffabc")
@example(msgpack.packb([3, msgpack.Timestamp(1)]))
@example(msgpack.packb([3, msgpack.ExtType(9, b"x")]))
@example(b"\x92\x01\xa2\xff\xff")
@example(b"\x92\x03\x81\x90\x01")
@example(b"\x91\xc3")
def test_garbage_is_refused(data: bytes) -> None:
    decodes_or_refuses(data)


@pytest.mark.parametrize("error", [TypeError, RecursionError, OverflowError, msgpack.UnpackException])
def test_whatever_msgpack_raises_is_a_protocol_error(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def unpackb(*_: object, **__: object) -> None:
        raise error("odd")

    monkeypatch.setattr(msgpack, "unpackb", unpackb)
    with pytest.raises(ProtocolError, match=f"{error.__name__}: odd"):
        decode(b"")


@given(st.recursive(st.none() | st.booleans() | INTS | st.floats() | st.text() | st.binary(), st.lists))
def test_any_msgpack_value_is_refused_or_a_message(value: object) -> None:
    try:
        data = msgpack.packb(value)
    except ValueError:
        return
    decodes_or_refuses(data)


@given(ANY_MESSAGE, st.data())
def test_truncated_is_refused(msg: object, data: st.DataObject) -> None:
    body = encode(msg)
    with pytest.raises(ProtocolError):
        decode(body[: data.draw(st.integers(0, len(body) - 1))])


@given(ANY_MESSAGE, st.data())
def test_flipped_bits_decode_or_are_refused(msg: object, data: st.DataObject) -> None:
    body = bytearray(encode(msg))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    decodes_or_refuses(bytes(body))


@given(ANY_MESSAGE, st.binary(min_size=1))
def test_trailing_bytes_are_refused(msg: object, rest: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(msg) + rest)


WRONG: dict[str, list[object]] = {
    "int": [1.0, True, None, "1", b"1", (), {}],
    "float": [True, None, "1", b"1", (), {}],
    "str": [1, None, b"x", ("x",), {}],
    "bool": [0, 1, None, "true"],
    "bytes": ["x", None, 1, ()],
    "tuple[int, ...]": [1, (1.0,), (True,), (None,), "12", b"12", ((1,),), {"1": 1}],
    "tuple[float, ...]": [1.0, (True,), ("1",)],
    "tuple[str, ...]": ["ab", (1,), (b"a",)],
    "tuple[bytes, ...]": [b"ab", ("a",)],
    "dict[str, float]": [(), {"a": "b"}, {"a": True}, {"a": None}, {b"a": 1.0}],
    "dict[str, str]": [(), {"a": 1}, {b"a": "b"}],
}
GOOD = AllTypes(1, 1.0, "", False, b"", (), (), (), (), {}, {})
WRONG_FIELDS = [(f.name, value) for f in dataclasses.fields(AllTypes) for value in WRONG[f.type]]


@pytest.mark.parametrize(("name", "value"), WRONG_FIELDS, ids=repr)
def test_wrong_types_are_refused_on_both_sides(name: str, value: Any) -> None:
    bad = dataclasses.replace(GOOD, **{name: value})
    with pytest.raises(ProtocolError, match=f"AllTypes.{name}"):
        encode(bad)
    fields = [getattr(bad, f.name) for f in dataclasses.fields(AllTypes)]
    with pytest.raises(ProtocolError, match=f"AllTypes.{name}|not msgpack"):
        decode(msgpack.packb([250, *fields]))


def test_a_short_array_takes_defaults() -> None:
    assert decode(msgpack.packb([48, "[]", 5])) == Chat("[]", 5)


@pytest.mark.parametrize(
    "array",
    [
        [1],
        [1, 1, "a"],
        [1, 1, "a", "b", "c"],
        [3, 1],
        [36, 4],
        [36, 4, [1], True, 0],
        [999],
        [-1],
        ["Hello"],
        [],
        {},
        7,
    ],
)
def test_wrong_shapes_are_refused(array: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(array))


@pytest.mark.parametrize(
    "msg",
    [
        Hello(2**64, "r", "b"),
        FetchExperts(0, (-(2**63) - 1,), 0),
        ErrorReply("internal", "half a pair: \ud800"),
        "Hello",
        object(),
        ["a", "list"],
    ],
    ids=lambda msg: type(msg).__name__,
)
def test_what_cannot_be_written_is_refused(msg: object) -> None:
    with pytest.raises(ProtocolError):
        encode(msg)


def test_not_a_number_travels() -> None:
    sent = StatsSnapshot("s", "b", 1.0, {"nan": math.nan, "inf": math.inf}, {})
    values = decode(encode(sent)).values  # type: ignore[attr-defined]
    assert math.isnan(values["nan"])
    assert values["inf"] == math.inf


def test_messages_are_frozen_and_slotted() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hello(1, "a", "b").version = 2  # type: ignore[misc]
    assert not hasattr(Hello(1, "a", "b"), "__dict__")


def test_what_ends_a_request() -> None:
    chunk = next(e for e in EXAMPLES if isinstance(e, TextChunk))
    assert not is_final(dataclasses.replace(chunk, finish_reason=""))
    assert is_final(dataclasses.replace(chunk, finish_reason="stop"))
    assert is_final(ExpertsFetched())
    assert is_final(ErrorReply("internal", ""))


def test_tags_and_field_types_are_checked_at_definition() -> None:
    with pytest.raises(AssertionError, match="belongs to Hello"):
        message(1)(type("Again", (), {"__annotations__": {}}))
    with pytest.raises(AssertionError, match="cannot travel"):
        message(251)(type("Odd", (), {"__annotations__": {"x": "list[int]"}}))
    with pytest.raises(AssertionError, match="one-way"):
        message(252, reply="Pong", one_way=True)


def test_the_registry_is_consistent() -> None:
    check_registry()
    assert spec_of(Generate((1,), 1)).reply == "TokensGenerated"
    assert not spec_of(Pong("", "", "", "", 0, 0.0)).is_request


def test_a_reply_that_does_not_exist_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.protocol import codec

    monkeypatch.setattr(codec, "_BY_TAG", dict(codec._BY_TAG))
    monkeypatch.setattr(codec, "_BY_CLASS", dict(codec._BY_CLASS))
    message(253, reply="Nowhere")(type("Lost", (), {"__annotations__": {}}))
    with pytest.raises(AssertionError, match="Nowhere"):
        check_registry()
