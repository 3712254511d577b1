"""Reads dense weights from the checkpoint's files, one tensor at a time, leaving nothing of them in the page cache.

On a CPU, quantised weights become float32 once, here, which is exact; the stored bytes are not kept.
"""

from __future__ import annotations

import os

import numpy as np
import torch

import kernels
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.safetensors_header import TensorInfo
from shared.errors import CheckpointError

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I8": torch.int8,
}


class WeightReader:
    """Tensors by name. Raises CheckpointError if one is missing, unreadable or of an unexpected type."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index

    def stored(self, name: str) -> torch.Tensor:
        """As stored: type and shape of the file."""
        info = self._index[name]
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{info.file}: tensor {name} has type {info.dtype}, which the model has no use for")
        return torch.from_numpy(_read(name, info)).view(TORCH_DTYPES[info.dtype]).view(info.shape)

    def float32(self, name: str) -> torch.Tensor:
        """A bfloat16 or float32 tensor as float32."""
        return self.stored(name).float()

    def linear(self, name: str) -> torch.Tensor:
        """The FP8 weight `name`.weight with its scales, dequantised: float32 [out, in]."""
        return kernels.dequant_fp8(self.stored(f"{name}.weight"), self.stored(f"{name}.scale"))

    def linears(self, *names: str) -> torch.Tensor:
        """Several FP8 weights of the same input, one above the other, so that one product serves them all."""
        return torch.cat([self.linear(name) for name in names])


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
