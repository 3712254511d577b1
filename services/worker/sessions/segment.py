"""A kept segment: what its tokens left in the sequence's state, the logits at its end, and the key that names it.

Owns the form in which one lies in a file: safetensors, with a checksum over everything. Knows no directory.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from services.worker.model import SegmentState
from services.worker.sessions.path_budget import Key

_POSITIONS, _LOGITS, _CHECKSUM = "positions", "logits", "sha256"
_APPENDED, _PASSING = "appended.", "passing."


class DamagedSegment(Exception):
    """Bytes that are not the segment they should be; the message says why."""


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """Never changed after it was made, so threads may share it. logits: float32 [vocab], after the last token."""

    state: SegmentState
    logits: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def encode(self, key: Key) -> bytes:
        """The bytes of a file for this segment."""
        tensors = self._tensors()
        return save(tensors | {_CHECKSUM: _checksum(key, tensors)})

    @classmethod
    def decode(cls, key: Key, data: bytes) -> KeptSegment:
        """Raises DamagedSegment if these are not the bytes that `encode` made for `key`."""
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise DamagedSegment(f"not a safetensors file ({error})") from error
        checksum = tensors.pop(_CHECKSUM, None)
        if checksum is None or not checksum.equal(_checksum(key, tensors)):
            raise DamagedSegment("its checksum is not that of its content and name")
        position, extra_position = tensors[_POSITIONS].tolist()
        state = SegmentState(position, extra_position, _part(tensors, _APPENDED), _part(tensors, _PASSING))
        return cls(state, tensors[_LOGITS])

    def _tensors(self) -> dict[str, torch.Tensor]:
        appended = {_APPENDED + name: tensor for name, tensor in self.state.appended.items()}
        passing = {_PASSING + name: tensor for name, tensor in self.state.passing.items()}
        positions = torch.tensor([self.state.position, self.state.extra_position])
        return {_POSITIONS: positions, _LOGITS: self.logits} | appended | passing


def chain_keys(root: Key, segments: Sequence[Sequence[int]]) -> list[Key]:
    """A key for each segment of token ids, which names it and all before it, down to what `root` stands for."""
    keys = []
    for ids in segments:
        root = hashlib.sha256(root + array("q", ids).tobytes()).digest()
        keys.append(root)
    return keys


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _checksum(key: Key, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """uint8 [32]: SHA-256 of the key and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(key)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
