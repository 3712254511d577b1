"""How a packed checkpoint is cut into files and what is where in them. Pure: names and sizes in, layout out.

One file per layer and extra block, one for the rest. In a file the experts come first, each one record (w1, w1.scale,
w3, w3.scale, w2, w2.scale) that begins at a multiple of 4 KiB; then the other tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shared.checkpoint.checksums import Checksum
from shared.checkpoint.manifest import PackedFile
from shared.checkpoint.records import PARTS, SLOT_ALIGNMENT
from shared.checkpoint.safetensors_header import TensorInfo
from shared.checkpoint.safetensors_writer import TensorSpec, encode_header, library_order

_BLOCK = re.compile(r"(layers|mtp)\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.ffn\.experts\.(\d+))\.(w[123]\.(?:weight|scale))")
GLOBAL_NAME = "global.safetensors"


class Stretch(NamedTuple):
    """What one checksum covers: an expert's record, or one tensor. `padding` bytes follow it."""

    what: str
    offset: int
    nbytes: int
    tensors: tuple[str, ...]
    padding: int

    @property
    def end(self) -> int:
        """Where the next stretch begins."""
        return self.offset + self.nbytes + self.padding


@dataclass(frozen=True)
class OutputFile:
    """One file of the pack. Padding, where records are no multiple of 4 KiB, is a tensor of zeros named `padding.*`."""

    name: str
    specs: tuple[TensorSpec, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    @cached_property
    def header(self) -> bytes:
        return encode_header(self.specs, align=SLOT_ALIGNMENT)

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(spec.nbytes for spec in self.specs)

    def stretches(self) -> Iterable[Stretch]:
        """In the order of the data."""
        sizes = {spec.name: spec.nbytes for spec in self.specs}
        offset = len(self.header)
        for what, tensors in self.groups:
            nbytes = sum(sizes[name] for name in tensors)
            padding = sizes.get(f"padding.{what}", 0)
            yield Stretch(what, offset, nbytes, tensors, padding)
            offset += nbytes + padding

    def packed(self, checksums: Iterable[Checksum]) -> PackedFile:
        """What the manifest says of the file; `checksums` are those of its stretches."""
        return PackedFile(self.nbytes, hashlib.sha256(self.header).hexdigest(), tuple(checksums))


def output_files(tensors: Mapping[str, TensorInfo]) -> list[OutputFile]:
    """The files of the pack, layers first: the shards of a usual download are then used up one by one."""
    blocks: dict[tuple[str, int], list[str]] = {}
    for name in tensors:
        match = _BLOCK.match(name)
        blocks.setdefault((match[1], int(match[2])) if match else ("zz", 0), []).append(name)
    return [_output_file(block, blocks[block], tensors) for block in sorted(blocks)]


def _output_file(block: tuple[str, int], names: list[str], tensors: Mapping[str, TensorInfo]) -> OutputFile:
    records = _records(names)
    specs: list[TensorSpec] = []
    groups: list[tuple[str, tuple[str, ...]]] = []
    for what, parts in records:
        specs += [_spec(name, tensors) for name in parts]
        groups.append((what, parts))
        padding = -sum(tensors[name].nbytes for name in parts) % SLOT_ALIGNMENT
        if padding:
            specs.append(TensorSpec(f"padding.{what}", "U8", (padding,)))
    taken = {name for _, parts in records for name in parts}
    others = library_order(_spec(name, tensors) for name in names if name not in taken)
    groups += [(spec.name, (spec.name,)) for spec in others]
    name = GLOBAL_NAME if block[0] == "zz" else f"{block[0]}.{block[1]}.safetensors"
    return OutputFile(name, (*specs, *others), tuple(groups))


def _records(names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(record name, its tensors in the order of a slot), by expert number."""
    there = set(names)
    experts = {int(match[2]): match[1] for name in names if (match := _EXPERT.fullmatch(name))}
    records = [(experts[number], tuple(f"{experts[number]}.{part}" for part in PARTS)) for number in sorted(experts)]
    return [(what, parts) for what, parts in records if there.issuperset(parts)]


def _spec(name: str, tensors: Mapping[str, TensorInfo]) -> TensorSpec:
    return TensorSpec(name, tensors[name].dtype, tensors[name].shape)
