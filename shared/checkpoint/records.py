"""Where an expert's six tensors lie on disk, and where they lie in a slot.

A slot holds one record: w1, w1.scale, w3, w3.scale, w2, w2.scale, contiguous, in the types of the checkpoint. On disk
the six may have any order; a read plan takes them with as few reads as that order allows. Knows no cache and no reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.safetensors_header import TensorInfo
from shared.errors import CheckpointError

SLOT_ALIGNMENT = 4096  # O_DIRECT into a slot needs the logical block size; 4 KiB covers every drive
PARTS = ("w1.weight", "w1.scale", "w3.weight", "w3.scale", "w2.weight", "w2.scale")

# Reading a short stretch that belongs to others is cheaper than a second request to the drive.
LARGEST_HOLE = 64 * 1024


class Part(NamedTuple):
    """One tensor inside a record; `dtype` is safetensors' string, sizes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, int]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The fixed order of a record. `slot_bytes` is the record rounded up to a page."""

    parts: tuple[Part, ...]
    record_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, config: ModelConfig) -> RecordLayout:
        hidden, width = config.hidden_size, config.moe_intermediate_size
        parts, offset = [], 0
        for name in PARTS:
            rows, columns = (hidden, width) if name.startswith("w2") else (width, hidden)
            weight = name.endswith("weight")
            shape = (rows, columns // 2) if weight else (rows, columns // 32)
            parts.append(Part(name, "I8" if weight else "F8_E8M0", shape, offset, shape[0] * shape[1]))
            offset += parts[-1].nbytes
        return cls(tuple(parts), offset, -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT)


# A pool holds the experts of one look-up while those of the next are read.
LOOK_UPS = 2


def least_slots(config: ModelConfig) -> int:
    """The smallest pool in which every token can be computed."""
    return LOOK_UPS * config.num_experts_per_tok


class Piece(NamedTuple):
    """`nbytes` at `source` of an extent go to `target` of the record."""

    source: int
    target: int
    nbytes: int


class Extent(NamedTuple):
    """One contiguous read, and where its bytes go."""

    file: Path
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


class ReadPlan(NamedTuple):
    """Everything to read for one record."""

    name: str
    extents: tuple[Extent, ...]


class ExpertRecords:
    """Read plans of every expert of a checkpoint, made on demand and kept: a miss waits for its plan."""

    def __init__(self, index: TensorIndex, config: ModelConfig) -> None:
        self._index = index
        self._config = config
        self.layout = RecordLayout.of(config)
        self._plans: dict[tuple[int, int], ReadPlan] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that a record may be read from."""
        return self._index.files

    def plan(self, moe_layer: int, expert: int) -> ReadPlan:
        """The fewest reads that fetch a record. Raises CheckpointError if a tensor is missing or of another shape."""
        key = moe_layer, expert
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = self._made_plan(*key)
        return plan

    def read_record(self, moe_layer: int, expert: int, out: memoryview) -> None:
        """Read one record into `out` [>= record_bytes], buffered. For a process that has no expertd.

        Raises:
            CheckpointError: a file is shorter than its header said, or cannot be read.
        """
        for extent in self.plan(moe_layer, expert).extents:
            data = _read(extent)
            for source, target, nbytes in extent.pieces:
                out[target : target + nbytes] = data[source : source + nbytes]

    def _made_plan(self, moe_layer: int, expert: int) -> ReadPlan:
        prefix = f"{self._config.layer_prefix(moe_layer)}ffn.experts.{expert}."
        located = [(self._locate(prefix, part), part) for part in self.layout.parts]
        located.sort(key=lambda item: (item[0].file, item[0].offset))
        extents: list[Extent] = []
        for info, part in located:
            extents[-1:] = _extend(extents[-1] if extents else None, info, part)
        return ReadPlan(prefix.rstrip("."), tuple(extents))

    def _locate(self, prefix: str, part: Part) -> TensorInfo:
        info = self._index[prefix + part.name]
        if (info.dtype, info.shape) != (part.dtype, part.shape):
            raise CheckpointError(
                f"{info.file}: tensor {prefix}{part.name} is {info.dtype} {list(info.shape)}, "
                f"expected {part.dtype} {list(part.shape)}"
            )
        return info


def _extend(last: Extent | None, info: TensorInfo, part: Part) -> list[Extent]:
    """`last` grown by this tensor if it lies close behind, else `last` and a new extent."""
    if last is not None and last.file == info.file and info.offset - (last.offset + last.nbytes) <= LARGEST_HOLE:
        piece = Piece(info.offset - last.offset, part.offset, part.nbytes)
        pieces = _joined(last.pieces, piece)
        return [Extent(last.file, last.offset, info.offset + info.nbytes - last.offset, pieces)]
    new = Extent(info.file, info.offset, info.nbytes, (Piece(0, part.offset, part.nbytes),))
    return [new] if last is None else [last, new]


def _joined(pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
    end = pieces[-1]
    if end.source + end.nbytes == piece.source and end.target + end.nbytes == piece.target:
        return (*pieces[:-1], Piece(end.source, end.target, end.nbytes + piece.nbytes))
    return (*pieces, piece)


def _read(extent: Extent) -> memoryview:
    buffer = memoryview(bytearray(extent.nbytes))
    try:
        with extent.file.open("rb", buffering=0) as file:
            file.seek(extent.offset)
            done = 0
            while done < extent.nbytes:
                count = file.readinto(buffer[done:])
                if not count:
                    raise CheckpointError(f"{extent.file}: ends before byte {extent.offset + extent.nbytes}: truncated")
                done += count
    except OSError as error:
        raise CheckpointError(f"{extent.file}: cannot read ({error.strerror})") from error
    return buffer
