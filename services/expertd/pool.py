"""The slot pool: a slab where the worker computes, and the control block. expertd creates it, a worker maps it."""

from __future__ import annotations

from services.expertd.policy import Key
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import LOOK_UPS, RecordLayout, least_slots
from shared.errors import CapacityError
from shared.memory.control_block import NO_SLOT, ControlBlock
from shared.memory.slab import create_slab
from shared.protocol.messages import PoolOpened

# Slots kept free for what is read ahead: two layers' hints on the published model, and little of a small pool.
LARGEST_RESERVE = 16
RESERVE_SHARE = 16


def slots_for(cache_bytes: int, config: ModelConfig) -> int:
    """How many slots a budget gives, at most one for each expert.

    Raises:
        CapacityError: too few for one layer's look-up and the one after it; names the budget that would do.
    """
    slot_bytes = RecordLayout.of(config).slot_bytes
    needed = least_slots(config)
    num_slots = min(cache_bytes // slot_bytes, config.num_moe_layers * config.n_routed_experts)
    if num_slots < needed:
        raise CapacityError(
            f"cache.bytes = {cache_bytes:,} holds {num_slots} experts of {slot_bytes:,} bytes, but a token needs "
            f"{config.num_experts_per_tok} of a layer and the next {config.num_experts_per_tok} meanwhile; "
            f"set cache.bytes to at least {needed * slot_bytes:,}"
        )
    return num_slots


def reserve_for(num_slots: int, config: ModelConfig) -> int:
    """How many slots to keep free. None where all experts of the backbone fit, or it would never be at rest."""
    outside = max(0, config.num_hidden_layers * config.n_routed_experts - num_slots)
    return min(LARGEST_RESERVE, num_slots // RESERVE_SHARE, outside)


class Pool:
    """`num_slots` slots of `slot_bytes`, one behind the other in `slab`; and the table that says what is where."""

    def __init__(self, num_slots: int, config: ModelConfig, device: str) -> None:
        self.device = device
        self.num_slots = num_slots
        self.reserve = reserve_for(num_slots, config)
        self.layers = config.num_moe_layers
        self.backbone_layers = config.num_hidden_layers
        self.experts = config.n_routed_experts
        self.slot_bytes = RecordLayout.of(config).slot_bytes
        self.wave_experts = num_slots // LOOK_UPS
        self.slab = create_slab(num_slots * self.slot_bytes, device)
        self.control = ControlBlock.create(self.layers, self.experts)

    def publish(self, key: Key, slot: int) -> None:
        """From now on look-ups find the key here; its bytes must be in the slot already."""
        self.control.slot_table[key.layer, key.expert] = slot

    def withdraw(self, key: Key) -> None:
        """From now on look-ups miss the key."""
        self.control.slot_table[key.layer, key.expert] = NO_SLOT

    def opened(self, boot_id: str) -> PoolOpened:
        """What a worker needs to map the pool."""
        return PoolOpened(
            boot_id=boot_id,
            control_handle=self.control.handle(),
            slab_handle=self.slab.handle(),
            slot_bytes=self.slot_bytes,
            num_slots=self.num_slots,
            wave_experts=self.wave_experts,
        )

    def close(self) -> None:
        self.slab.close()
        self.control.close()
