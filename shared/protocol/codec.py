"""Messages as bytes: a frozen dataclass with a tag on this side, the msgpack array `[tag, field, ...]` on the wire.

Field types are a closed, flat set, and every value is checked on both sides, so what arrives is what the class says.
Knows no single message: those are in shared.protocol.messages.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import msgpack

from shared.errors import ProtocolError

T = TypeVar("T")

# A message with this field is a part of a stream until the field says why the stream ended.
FINISH_FIELD = "finish_reason"

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """What the decorator said about a message class. `required` counts the fields without a default."""

    cls: type
    tag: int
    reply: str | None
    one_way: bool
    names: tuple[str, ...]
    checks: tuple[Check, ...]
    required: int

    @property
    def is_request(self) -> bool:
        return self.reply is not None


_BY_TAG: dict[int, MessageSpec] = {}
_BY_CLASS: dict[type, MessageSpec] = {}


@dataclass_transform(frozen_default=True)
def message(tag: int, *, reply: str | None = None, one_way: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class a message: frozen, slotted, and known to `encode` and `decode` under `tag`.

    `reply` names the class that answers it; a message with neither `reply` nor `one_way` is itself an answer.
    """
    assert not (reply and one_way), "a one-way message has no reply"

    def register(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, slots=True)(cls)
        spec = _spec(made, tag, reply, one_way)
        assert tag not in _BY_TAG, f"tag {tag} of {made.__name__} belongs to {_BY_TAG[tag].cls.__name__}"
        _BY_TAG[tag] = _BY_CLASS[made] = spec
        return made

    return register


def check_registry() -> None:
    """Assert that every request's reply is a message and not itself a request."""
    by_name = {spec.cls.__name__: spec for spec in _BY_TAG.values()}
    for name, spec in by_name.items():
        if spec.reply is not None:
            answer = by_name.get(spec.reply)
            assert answer is not None, f"{name} is answered by {spec.reply}, which is no message"
            assert not answer.is_request, f"{name} is answered by {spec.reply}, which is a request"
            assert not answer.one_way, f"{name} is answered by {spec.reply}, which is one-way"


def registered() -> tuple[MessageSpec, ...]:
    """Every known message, by tag."""
    return tuple(_BY_TAG[tag] for tag in sorted(_BY_TAG))


def spec_of(msg: object) -> MessageSpec:
    """The spec of a message; ProtocolError if its class is none."""
    spec = _BY_CLASS.get(type(msg))
    if spec is None:
        raise ProtocolError(f"{type(msg).__name__} is not a message")
    return spec


def is_final(msg: object) -> bool:
    """Whether this reply ends its request: all do, but for parts of a stream, whose finish_reason is empty."""
    return getattr(msg, FINISH_FIELD, None) != ""


def encode(msg: object) -> bytes:
    """The bytes of a message. Raises ProtocolError if a field holds what its type forbids."""
    spec = spec_of(msg)
    values = [getattr(msg, name) for name in spec.names]
    _check(spec, values)
    try:
        return typing.cast(bytes, msgpack.packb([spec.tag, *values]))
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"{spec.cls.__name__} cannot be written: {error}") from error


def decode(data: bytes) -> object:
    """The message in these bytes. Raises ProtocolError, and nothing else, if there is none."""
    try:
        array = msgpack.unpackb(data, use_list=False, raw=False, strict_map_key=True)
    except Exception as error:  # the promise must not depend on which types msgpack chooses to raise
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from error
    if type(array) is not tuple or not array or type(array[0]) is not int:
        raise ProtocolError("not a message: expected an array that starts with a tag")
    spec = _BY_TAG.get(array[0])
    if spec is None:
        raise ProtocolError(f"unknown message tag {array[0]}")
    values = array[1:]
    if not spec.required <= len(values) <= len(spec.names):
        wanted = f"{spec.required} to {len(spec.names)}" if spec.required < len(spec.names) else f"{spec.required}"
        raise ProtocolError(f"{spec.cls.__name__} has {wanted} fields, not {len(values)}")
    _check(spec, values)
    return spec.cls(*values)


def _check(spec: MessageSpec, values: typing.Sequence[object]) -> None:
    for i, value in enumerate(values):
        if not spec.checks[i](value):
            kind = type(value).__name__
            raise ProtocolError(f"{spec.cls.__name__}.{spec.names[i]} cannot hold this value of type {kind}")


def _is(*kinds: type) -> Check:
    return lambda value: type(value) in kinds


def _tuple_of(*kinds: type) -> Check:
    allowed = set(kinds)
    return lambda value: type(value) is tuple and allowed.issuperset(map(type, value))


def _dict_of(*kinds: type) -> Check:
    allowed = set(kinds)
    return lambda value: (
        type(value) is dict and {str}.issuperset(map(type, value)) and allowed.issuperset(map(type, value.values()))
    )


_CHECKS: dict[object, Check] = {
    int: _is(int),
    float: _is(float, int),
    str: _is(str),
    bool: _is(bool),
    bytes: _is(bytes),
    tuple[int, ...]: _tuple_of(int),
    tuple[float, ...]: _tuple_of(float, int),
    tuple[str, ...]: _tuple_of(str),
    tuple[bytes, ...]: _tuple_of(bytes),
    dict[str, float]: _dict_of(float, int),
    dict[str, str]: _dict_of(str),
}


def _spec(cls: type, tag: int, reply: str | None, one_way: bool) -> MessageSpec:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    for field in fields:
        assert hints[field.name] in _CHECKS, f"{cls.__name__}.{field.name} cannot travel as {hints[field.name]}"
    return MessageSpec(
        cls=cls,
        tag=tag,
        reply=reply,
        one_way=one_way,
        names=tuple(f.name for f in fields),
        checks=tuple(_CHECKS[hints[f.name]] for f in fields),
        required=sum(f.default is dataclasses.MISSING for f in fields),
    )
