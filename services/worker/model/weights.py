"""Reads dense weights from the checkpoint's files, one tensor at a time, leaving nothing of them in the page cache.

Weights become what the device's operations want of them, on the device; the host keeps no second copy.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch

import kernels
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.safetensors_header import TensorInfo
from shared.errors import CheckpointError

log = logging.getLogger(__name__)

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I8": torch.int8,
}
CPU = torch.device("cpu")


class WeightReader:
    """Tensors by name, on `device`. Raises CheckpointError if one is missing, unreadable or of an unexpected type."""

    def __init__(self, index: TensorIndex, device: torch.device = CPU) -> None:
        self._index = index
        self.bytes_read = 0
        self.device = device

    def stored(self, name: str) -> torch.Tensor:
        """As stored: type and shape of the file."""
        info = self._index[name]
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{info.file}: tensor {name} has type {info.dtype}, which the model has no use for")
        self.bytes_read += info.nbytes
        return torch.from_numpy(_read(name, info)).to(self.device).view(TORCH_DTYPES[info.dtype]).view(info.shape)

    def expert_ids(self, name: str, experts: int) -> torch.Tensor:
        """A table of ids below `experts`, as stored; a row should not name one twice.

        Raises CheckpointError if an id is out of range.
        """
        ids, file = self.stored(name), self._index[name].file
        if ((ids < 0) | (ids >= experts)).any():
            raise CheckpointError(f"{file}: tensor {name} names experts that are not there; download the file again")
        ascending = ids.sort(dim=1).values
        if doubled := int((ascending[:, 1:] == ascending[:, :-1]).any(dim=1).sum()):
            # Of no harm where a model never says such a token, so it is for the user to judge.
            log.warning(
                "%s: tensor %s names an expert twice for %d tokens, whose answers may differ", file, name, doubled
            )
        return ids

    def float32(self, name: str) -> torch.Tensor:
        """A bfloat16 or float32 tensor as float32."""
        return self.stored(name).float()

    def linear(self, *names: str) -> torch.Tensor:
        """FP8 weights of the same input, `name`.weight with its scales, prepared as one for `Precision.linear`."""
        return kernels.prepare_fp8(*(self._fp8(name) for name in names))

    def matrix(self, name: str) -> torch.Tensor:
        """A bfloat16 weight for `float_linear`: as stored on a GPU, which converts on the way; else as float32."""
        return self.stored(name) if self.device.type == "cuda" else self.float32(name)

    def _fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.stored(f"{name}.weight"), self.stored(f"{name}.scale")


def _read(name: str, info: TensorInfo) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data = np.empty(info.nbytes, np.uint8)
    view, done = data.data, 0
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            while done < info.nbytes and (count := file.readinto(view[done:])):
                done += count
            os.posix_fadvise(file.fileno(), info.offset, info.nbytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot read tensor {name} ({error.strerror})") from error
    if done < info.nbytes:
        raise CheckpointError(f"{info.file}: ends inside tensor {name}: truncated; download it again")
    return data
