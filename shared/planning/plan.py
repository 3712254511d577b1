"""The memory plan of one deployment on one machine: what stays resident, what the expert cache gets, and the verdict.

Used by `icebox plan`, by `icebox doctor`, and by expertd when `cache.bytes` is "auto". Imports no torch, loads nothing;
weights are counted in the types they are held in: a GPU's as stored, a CPU's in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout, least_slots
from shared.checkpoint.safetensors_writer import TensorSpec
from shared.checkpoint.schedule import expected_tensors
from shared.config import AUTO_BYTES, Config, gpu_ordinal
from shared.errors import CapacityError
from shared.planning.expectation import Range, StepCost, hit_rate, tokens_per_s
from shared.planning.machine import Machine, probe

MB, GB = 10**6, 10**9

# Interpreters, libraries, sockets and staging rings of the three services; with CUDA, two contexts more.
HOST_BYTES = GB
CUDA_BYTES = 1500 * MB
# Left alone. A machine whose GPU shares its memory stops answering, instead of killing a process, when it runs out:
# pools of 100 GiB have been safe on 128 GB ones with 9 to 11 GiB left.
RESERVE = {"system": 0.05, "unified": 0.08, "device": 0.02}
# Temporaries of a prefill chunk, in units of its hidden streams.
WORKSPACE_STREAMS = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan: so many bytes for this."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`available` is the memory that pool and weights come from, `room` what is left for the cache.

    `problems` are reasons to refuse, each naming the number that would do; empty means that it fits.
    """

    memory: str
    available: int
    parts: tuple[Part, ...]
    reserve: int
    room: int
    cache_bytes: int
    slot_bytes: int
    slots: int
    experts: int
    hits: Range
    speed: Range | None
    cost: StepCost
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def backbone_bytes(self) -> int:
        """The backbone's dense weights and the state of one sequence: what stays whatever the cache holds."""
        return self.parts[0].nbytes + self.parts[1].nbytes

    @property
    def cached(self) -> float:
        """The part of all experts that the cache holds."""
        return self.slots / self.experts


def resolve_cache_bytes(config: Config, model_config: ModelConfig) -> int:
    """`cache.bytes`, worked out from this machine's memory if it is "auto".

    Raises:
        CapacityError: what must stay resident leaves too little, or the configured size does not fit.
    """
    machine = probe(config.model.path, speeds=False, gpu=gpu_ordinal(config.worker.device))
    plan = make_plan(config, model_config, machine)
    if plan.problems:
        raise CapacityError(f"{config.source}: {'; '.join(plan.problems)}")
    return plan.cache_bytes


def make_plan(config: Config, model: ModelConfig, machine: Machine) -> Plan:
    """Work everything out. Never raises for what does not fit: see `Plan.problems`."""
    tensors = _tensor_bytes(model, config.worker.device)
    extra = sum(nbytes for name, nbytes in tensors.items() if name.startswith("mtp."))
    context = min(config.model.max_context, model.max_position_embeddings)
    memory, available, total = _memory(config, machine)
    # Sessions are kept in the host's memory, which is not the cache's where a GPU has its own.
    sessions = 0 if memory == "device" else config.worker.session_bytes
    parts = (
        Part("dense weights of the backbone", sum(tensors.values()) - extra),
        Part(f"state of one sequence, {context:,} tokens", state_bytes(model, context, config.worker.device)),
        Part("dense weights of the extra blocks", extra),
        Part(f"workspace of a prefill chunk, {config.worker.prefill_chunk:,} tokens", _workspace_bytes(config, model)),
        Part(f"rope tables, {context:,} positions", _rope_bytes(model, context)),
        Part("hints of decoding", _hint_bytes(config, model)),
        Part("states of recent conversations", sessions),
        Part("processes", HOST_BYTES + (0 if config.worker.device == "cpu" else CUDA_BYTES)),
    )
    layout = RecordLayout.of(model)
    experts = model.num_moe_layers * model.n_routed_experts
    reserve = int(total * RESERVE[memory])
    left = available - reserve - sum(part.nbytes for part in parts)
    room = max(0, left)
    least = least_slots(model) * layout.slot_bytes
    cache_bytes = _cache_bytes(config, room, experts * layout.slot_bytes, layout.slot_bytes)
    slots = min(experts, cache_bytes // layout.slot_bytes)
    hits = hit_rate(slots / experts)
    cost = _step_cost(model, machine, config, tensors, layout.record_bytes)
    return Plan(
        memory=memory,
        available=available,
        parts=parts,
        reserve=reserve,
        room=room,
        cache_bytes=cache_bytes,
        slot_bytes=layout.slot_bytes,
        slots=slots,
        experts=experts,
        hits=hits,
        speed=tokens_per_s(cost, hits),
        cost=cost,
        problems=tuple(_problems(config, machine, memory, available, left, least)),
    )


def state_bytes(model: ModelConfig, context: int, device: str) -> int:
    """Bytes of one sequence's caches, extra blocks included: window rings and compressed entries in bf16 (on a CPU in
    fp32, which saves conversions), compressor states in fp32."""
    value, total = 4 if device == "cpu" else 2, 0
    for ratio in model.compress_ratios:
        total += model.sliding_window * model.head_dim * value
        if ratio:
            total += _compressed_bytes(ratio, model.head_dim, context, value)
        if ratio == 4:
            total += _compressed_bytes(ratio, model.index_head_dim, context, value)
    return total


def _compressed_bytes(ratio: int, width: int, context: int, value: int) -> int:
    """Entries so far, and the kv and gate states of the group that is being filled (with ratio 4, of two groups)."""
    overlap = 2 if ratio == 4 else 1
    return context // ratio * width * value + 2 * (overlap * ratio) * (overlap * width) * 4


def _rope_bytes(model: ModelConfig, context: int) -> int:
    """Two tables, for layers with and without compression: two float32 for every pair of rotated values."""
    pairs = model.qk_rope_head_dim // 2
    return 2 * pairs * (8 * context + 4)  # complex64, and the float32 frequencies that they are made of


def _hint_bytes(config: Config, model: ModelConfig) -> int:
    """On a GPU a second copy of the tables by which token ids choose experts, two bytes an entry, and one gate of zeros
    behind the last layer's."""
    if config.worker.device == "cpu":
        return 0
    hash_layers = model.num_hash_layers if config.prefetch.hash_layers else 0
    tables = 2 * hash_layers * model.vocab_size * model.num_experts_per_tok
    return tables + 2 * model.n_routed_experts * model.hidden_size


def _workspace_bytes(config: Config, model: ModelConfig) -> int:
    tokens = min(config.worker.prefill_chunk, config.model.max_context)
    return tokens * WORKSPACE_STREAMS * model.hc_mult * model.hidden_size * 2


def _tensor_bytes(model: ModelConfig, device: str) -> Mapping[str, int]:
    """What every tensor that is not a routed expert's takes in memory."""
    specs = (TensorSpec(name, dtype, shape) for name, (dtype, shape) in expected_tensors(model).items())
    size = _float32_bytes if device == "cpu" else _stored_bytes
    return {spec.name: size(spec) for spec in specs if ".ffn.experts." not in spec.name}


def _stored_bytes(spec: TensorSpec) -> int:
    return spec.nbytes


def _float32_bytes(spec: TensorSpec) -> int:
    """A CPU's worker dequantises what it multiplies with once, and drops the scales; looked-up rows stay stored."""
    if spec.dtype == "F8_E8M0":
        return 0
    return spec.nbytes if spec.dtype == "I64" or spec.name == "embed.weight" else 4 * math.prod(spec.shape)


def _memory(config: Config, machine: Machine) -> tuple[str, int, int]:
    """Which memory holds the pool, how much of it is available, how much there is in all."""
    if config.worker.device == "cpu" or machine.gpu is None:
        return "system", machine.memory_available, machine.memory_total
    if machine.gpu.integrated:
        return "unified", machine.memory_available, machine.memory_total
    return "device", machine.gpu.memory_free, machine.gpu.memory_total


def _cache_bytes(config: Config, room: int, everything: int, slot_bytes: int) -> int:
    if config.cache.bytes != AUTO_BYTES:
        return config.cache.bytes
    room = min(room, everything)
    return room - room % slot_bytes


def _step_cost(
    model: ModelConfig, machine: Machine, config: Config, tensors: Mapping[str, int], record_bytes: int
) -> StepCost:
    # A step reads one row of the embedding and of the hash tables, and nothing of the extra blocks.
    skipped = re.compile(r"embed\.|mtp\.|.*\.tid2eid$")
    gpu = None if config.worker.device == "cpu" else machine.gpu
    read = {name: nbytes for name, nbytes in tensors.items() if not skipped.match(name)}
    gates = sum(nbytes for name, nbytes in read.items() if name.endswith(".ffn.gate.weight"))
    return StepCost(
        # Guesses of the next layer's experts take its gate, one layer early.
        dense_bytes=sum(read.values()) + (gates if config.prefetch.look_ahead else 0),
        record_bytes=record_bytes,
        uses=model.num_hidden_layers * model.num_experts_per_tok,
        memory_bandwidth=gpu.bandwidth if gpu else machine.memory_speed,
        disk_bandwidth=machine.disk_speed,
    )


def _problems(config: Config, machine: Machine, memory: str, available: int, left: int, least: int) -> list[str]:
    problems = []
    if config.worker.device != "cpu" and machine.gpu is None:
        problems.append(f'worker.device is "{config.worker.device}", but there is no such NVIDIA GPU; set it to "cpu"')
    if left < least:
        more = least - left
        problems.append(
            f"{_gb(available)} of {memory} memory are too little by {_gb(more)}: "
            f"free that much, or lower model.max_context, worker.session_bytes or worker.prefill_chunk"
        )
    elif config.cache.bytes != AUTO_BYTES and config.cache.bytes > left:
        problems.append(f"cache.bytes = {_gb(config.cache.bytes)} does not fit; at most {_gb(left)} do")
    sessions, host = config.worker.session_bytes, machine.memory_available
    if memory == "device" and sessions > host:
        problems.append(f"worker.session_bytes = {_gb(sessions)} exceeds the host's {_gb(host)} of available memory")
    if 0 < config.cache.bytes < least:
        problems.append(f"cache.bytes = {config.cache.bytes:,} cannot hold one step; set it to at least {least:,}")
    return problems


def _gb(nbytes: int) -> str:
    return f"{nbytes / GB:.2f} GB" if nbytes >= GB / 10 else f"{nbytes / MB:.2f} MB"
