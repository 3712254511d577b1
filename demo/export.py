"""Writes the trained model in the published layout: shards, index, configurations, tokenizer, chat sentences.

    python -m demo.export --masters DIR --out demo/checkpoint

Quantises as the published weights are: FP4 experts, FP8 linears, bfloat16 and float32 for the rest. What must be there
is said by `shared.checkpoint.schedule`, against which the result is checked.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from demo import quantise
from demo.corpus import HERE
from demo.model import published
from demo.names import published_name
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.safetensors_writer import TensorSpec, encode_header
from shared.checkpoint.schedule import expected_tensors, problems
from shared.checkpoint.synth_shapes import GENERATION_CONFIG, reference_config

SHARD_BYTES = 8_000_000
Tensors = dict[str, Tensor]


def read_masters(directory: Path) -> Tensors:
    """The trainer's result, by `transformers` names; hash tables come back as int64.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(directory.glob("masters-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory}: no masters-*.safetensors; train first")
    tensors: Tensors = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return {name: t.long() if t.dtype == torch.int16 else t for name, t in tensors.items()}


def checkpoint_tensors(masters: Mapping[str, Tensor], shape: ModelConfig) -> Tensors:
    """Every tensor of the checkpoint by its published name, as it is stored.

    Raises:
        KeyError: a tensor that the shape demands was not trained.
    """
    expected = expected_tensors(shape)
    plain = dict(_split(masters))
    stored: Tensors = {}
    for name, (dtype, _) in expected.items():
        if dtype == "F8_E8M0":
            continue
        value = plain[name]
        if dtype == "I8":
            stored[name], stored[_scale(name)] = quantise.fp4_codes(value)
        elif dtype == "F8_E4M3":
            stored[name], stored[_scale(name)] = quantise.fp8_codes(value)
        else:
            stored[name] = value.to({"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}[dtype])
    return stored


def _scale(weight: str) -> str:
    return weight.removesuffix("weight") + "scale"


def _split(masters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in masters.items():
        target = published_name(name)
        if "*" not in target:
            yield target, tensor
            continue
        for number, expert in enumerate(tensor):
            one = target.replace("*", str(number))
            if "w1+w3" in one:
                gate, up = expert.chunk(2)
                yield one.replace("w1+w3", "w1"), gate
                yield one.replace("w1+w3", "w3"), up
            else:
                yield one, expert


def write_checkpoint(masters: Mapping[str, Tensor], table: dict[str, Any], out: Path, tokenizer: Path) -> int:
    """Write the whole directory anew; its size in bytes.

    Raises:
        ValueError: what was written is not what the schedule demands; says the first difference.
    """
    shape = ModelConfig.from_published(table)
    if out.exists():
        shutil.rmtree(out)
    (out / "inference").mkdir(parents=True)
    (out / "encoding").mkdir()
    _json(out / "config.json", table)
    _json(out / "inference" / "config.json", reference_config(table))
    _json(out / "generation_config.json", GENERATION_CONFIG)
    shutil.copyfile(HERE / "encoding_dsv4.py", out / "encoding" / "encoding_dsv4.py")
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    _json(out / "tokenizer_config.json", _tokenizer_config())
    _write_shards(checkpoint_tensors(masters, shape), shape, out)
    for problem in problems(TensorIndex.open(out), shape):
        raise ValueError(problem)
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def _tokenizer_config() -> dict[str, Any]:
    from shared.checkpoint.synth_tokenizer import LEADING_TOKENS

    bos, eos, _ = LEADING_TOKENS
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(stored: Tensors, shape: ModelConfig, out: Path) -> None:
    expected = expected_tensors(shape)
    groups: list[list[TensorSpec]] = [[]]
    for name, (dtype, dims) in expected.items():
        spec = TensorSpec(name, dtype, dims)
        if sum(s.nbytes for s in groups[-1]) + spec.nbytes > SHARD_BYTES:
            groups.append([])
        groups[-1].append(spec)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        with (out / file).open("wb") as opened:
            opened.write(encode_header(specs))
            for spec in specs:
                opened.write(_bytes(stored[spec.name], spec))
        weight_map |= dict.fromkeys((spec.name for spec in specs), file)
    total = sum(spec.nbytes for specs in groups for spec in specs)
    _json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _bytes(tensor: Tensor, spec: TensorSpec) -> bytes:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert len(raw) == spec.nbytes, f"{spec.name}: {len(raw)} bytes for {spec.shape} of {spec.dtype}"
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masters", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint")
    args = parser.parse_args()
    size = write_checkpoint(read_masters(args.masters), published(), args.out, HERE / "tokenizer.json")
    print(f"{args.out}: {size:,} bytes")


if __name__ == "__main__":
    main()
