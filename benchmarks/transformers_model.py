"""The transformers library's DeepSeek-V4 with the weights of one of our checkpoints, dequantised to a plain type.

It serves as a second opinion in tests and as the opponent in benchmarks. Knows nothing of how Icebox computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import kernels
from services.worker.model.weights import WeightReader
from shared.checkpoint.index import TensorIndex

# What the library does not know of, or has under `weight` alone.
_IGNORED_PREFIXES = ("mtp.",)
_SCALE = ".scale"


def load_transformers(directory: Path, dtype: torch.dtype) -> Any:
    """DeepseekV4ForCausalLM in `dtype`, ready to infer; extra blocks are left out, the library has none."""
    config = DeepseekV4Config.from_pretrained(directory)
    del config.quantization_config
    weights = _plain_weights(TensorIndex.open(directory))
    model = DeepseekV4ForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    return model.to(dtype).eval()


def _plain_weights(index: TensorIndex) -> dict[str, torch.Tensor]:
    reader = WeightReader(index)
    names = [n for n in index.tensors if not n.startswith(_IGNORED_PREFIXES) and not n.endswith(_SCALE)]
    return {name: _plain(reader, index, name) for name in names}


def _plain(reader: WeightReader, index: TensorIndex, name: str) -> torch.Tensor:
    """Float32 values of a weight, or an integer table as it is."""
    stored, scale = reader.stored(name), name.removesuffix(".weight") + _SCALE
    if stored.dtype == torch.int8:
        return kernels.dequant_fp4(stored, reader.stored(scale))
    if stored.dtype == torch.float8_e4m3fn:
        return kernels.dequant_fp8(stored, reader.stored(scale))
    return stored if stored.dtype == torch.int64 else stored.to(torch.float32)
