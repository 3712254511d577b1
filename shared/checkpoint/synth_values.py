"""Plausible values for the tensors of a random checkpoint, fast enough for a disk.

Weights have standard deviation 1/sqrt(inputs), so activations keep their size through the depth. Bulk tensors are
slices of a few pools of random bytes, taken at a random place and with random signs: every tensor differs, and no
random number is drawn per byte. Small or structured tensors are drawn one by one. Everything depends on the seed and
the tensor's name only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.checkpoint.safetensors_writer import TensorSpec
from shared.checkpoint.synth_routing import hash_table, router_bias, zipf_use

Bytes = NDArray[np.uint8]

MIB = 1 << 20
# A chunk stays in the second-level cache between the mask and the copy into the page cache.
CHUNK_BYTES = MIB
POOL_BYTES = 32 * MIB
# Which bits of a pool's 64-bit words may be flipped at will: all of an FP4 pair, the signs of the others, no scale's.
_FREE_BITS = {"I8": 2**64 - 1, "F8_E4M3": 0x8080808080808080, "BF16": 0x8000800080008000, "F8_E8M0": 0}
# Root mean square of the sixteen FP4 codes 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
_FP4_RMS = math.sqrt(68.5 / 8)
# Standard deviation of the stored e4m3 codes: 448, the largest, is a little under five of it.
_FP8_RMS = 90.0
_HEAD_GAIN = 3.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Random bytes of one kind, as 64-bit words, longer than a chunk."""

    words: NDArray[np.uint64]
    free_bits: int

    def chunks(self, nbytes: int, entropy: Iterator[int]) -> Iterator[Bytes]:
        """Slices from random places, each under a random mask of the free bits. Valid until the next is asked for."""
        scratch = np.empty(CHUNK_BYTES // 8, dtype=np.uint64)
        places = len(self.words) - len(scratch) + 1
        for start in range(0, nbytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, nbytes - start)
            count, place = -(-length // 8), next(entropy) % places
            mask = np.uint64(next(entropy) & self.free_bits)
            np.bitwise_xor(self.words[place : place + count], mask, out=scratch[:count])
            yield scratch.view(np.uint8)[:length]


class ValueSource:
    """Streams the bytes of any tensor of one checkpoint.

    `shapes` names every tensor (a scale's size follows from its weight's shape). Chunks yielded are valid until the
    next one is asked for.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], experts_per_tok: int, seed: int, skew: float) -> None:
        self._shapes = shapes
        self._experts_per_tok = experts_per_tok
        self._seed = seed
        self._skew = skew
        self._pools: dict[tuple[str, float], Pool] = {}
        widest = max(math.prod(shape) for shape in shapes.values())
        self._pool_bytes = min(POOL_BYTES, 4 * widest) + CHUNK_BYTES

    def chunks(self, spec: TensorSpec) -> Iterator[Bytes]:
        special = self._special(spec)
        if special is not None:
            yield np.ascontiguousarray(special).reshape(-1).view(np.uint8)
            return
        yield from self._pool(spec).chunks(spec.nbytes, _entropy(self._seed, spec.name))

    def _special(self, spec: TensorSpec) -> NDArray[Any] | None:
        leaf = spec.name.rpartition(".")[2]
        rng = _generator(self._seed, spec.name)
        if leaf == "tid2eid":
            experts = self._shapes[spec.name.replace("tid2eid", "weight")][0]
            use = zipf_use(experts, self._experts_per_tok, self._skew)
            return hash_table(rng, use, spec.shape[0], spec.shape[1])
        if spec.name.endswith("gate.bias"):
            return router_bias(rng, zipf_use(spec.shape[0], self._experts_per_tok, self._skew))
        if spec.dtype == "F32":
            return _small_float(rng, leaf, spec.shape)
        if spec.dtype == "BF16" and len(spec.shape) == 1:
            return _bf16(1 + 0.1 * rng.standard_normal(spec.shape, dtype=np.float32))
        return None

    def _pool(self, spec: TensorSpec) -> Pool:
        kind = spec.dtype, self._std(spec)
        if kind not in self._pools:
            self._pools[kind] = self._make_pool(*kind)
        return self._pools[kind]

    def _std(self, spec: TensorSpec) -> float:
        """Of the values a pool holds, before any scale; 0 where the type alone decides."""
        if spec.dtype in ("I8", "F8_E4M3"):
            return 0.0
        if spec.dtype == "F8_E8M0":
            return self._scale(spec.name)
        if spec.name == "embed.weight":
            return 1.0
        gain = _HEAD_GAIN if spec.name == "head.weight" else 1.0
        return gain / math.sqrt(spec.shape[-1])

    def _scale(self, name: str) -> float:
        weight = name.removesuffix("scale") + "weight"
        packed = ".ffn.experts." in name
        inputs = self._shapes[weight][-1] * (2 if packed else 1)
        return 1 / math.sqrt(inputs) / (_FP4_RMS if packed else _FP8_RMS)

    def _make_pool(self, dtype: str, std: float) -> Pool:
        rng, nbytes = _generator(self._seed, f"pool {dtype} {std}"), self._pool_bytes
        if dtype == "I8":
            values = _random_bytes(rng, nbytes)
        elif dtype == "F8_E8M0":
            values = _scales(_random_bytes(rng, min(nbytes, 8 * CHUNK_BYTES)), std)
        elif dtype == "F8_E4M3":
            values = _e4m3(_normal_quantiles() * np.float32(_FP8_RMS))[_random_bytes(rng, 2 * nbytes).view(np.uint16)]
        else:
            values = _bf16(_normal_quantiles() * np.float32(std))[_random_bytes(rng, nbytes).view(np.uint16)].view(
                np.uint8
            )
        return Pool(values.view(np.uint64), _FREE_BITS[dtype])


def _small_float(rng: np.random.Generator, leaf: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if leaf.endswith("_scale"):
        return (0.7 + 0.1 * noise).astype(np.float32)
    if leaf.endswith("_fn"):
        return (noise / math.sqrt(shape[-1])).astype(np.float32)
    return noise if leaf == "attn_sink" else (0.5 * noise).astype(np.float32)


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def _entropy(seed: int, name: str) -> Iterator[int]:
    """64-bit numbers for one tensor; far cheaper to start than a generator, and there are 69,187 tensors."""
    state = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=64)
    while True:
        block = state.digest()
        yield from (int.from_bytes(block[i : i + 8], "little") for i in range(0, 64, 8))
        state.update(block)


def _random_bytes(rng: np.random.Generator, nbytes: int) -> Bytes:
    return rng.bit_generator.random_raw(-(-nbytes // 8)).view(np.uint8)


def _normal_quantiles() -> NDArray[np.float32]:
    """65536 equally likely values of a standard normal."""
    normal = NormalDist()
    half = [normal.inv_cdf((i + 0.5) / 65536) for i in range(32768)]
    return np.array(half + [-x for x in reversed(half)], dtype=np.float32)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even. Finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _e4m3(values: NDArray[np.float32]) -> Bytes:
    """Codes of the nearest e4m3 values (4 exponent bits of bias 7, 3 mantissa bits, 448 the largest)."""
    codes = np.arange(0x7F, dtype=np.uint8)
    exponent, mantissa = codes >> 3, (codes & 7).astype(np.float32)
    normal = (1 + mantissa / 8) * np.exp2(exponent.astype(np.float32) - 7)
    magnitudes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    nearest = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values)).astype(np.uint8)
    return nearest | np.where(np.signbit(values), np.uint8(0x80), np.uint8(0))


def _scales(random: Bytes, target: float) -> Bytes:
    """ue8m0 bytes of two neighbouring powers of two, mixed so that their root mean square is `target`."""
    exponent = math.floor(math.log2(target))
    upper = ((target / 2.0**exponent) ** 2 - 1) / 3
    return np.uint8(127 + exponent) + (random < round(256 * upper)).view(np.uint8)
