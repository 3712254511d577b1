"""The control block as a decode step's kernels see it, and the slot pool."""

from __future__ import annotations

from typing import NamedTuple

import torch

from services.worker.device_memory import device_tensor
from shared.memory.control_block import TICKET_WORDS, TICKETS, Addresses


class Control(NamedTuple):
    """Tensors over the host's memory that the GPU reaches; see shared.memory.control_block for who writes what."""

    table: torch.Tensor
    clock: torch.Tensor
    abort: torch.Tensor
    num_tickets: torch.Tensor
    ring: torch.Tensor
    uses: torch.Tensor

    @classmethod
    def at(cls, addresses: Addresses, layers: int, experts: int, device: str) -> Control:
        """table and uses are [layers, experts]. Drop it before the control block is closed."""

        def view(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return device_tensor(address, shape, dtype, device)

        return cls(
            table=view(addresses.slot_table, (layers, experts), torch.int32),
            clock=view(addresses.worker_clock, (1,), torch.int64),
            abort=view(addresses.abort, (1,), torch.int32),
            num_tickets=view(addresses.ticket_head, (1,), torch.int64),
            ring=view(addresses.tickets, (TICKETS, TICKET_WORDS), torch.int32),
            uses=view(addresses.uses, (layers, experts), torch.int64),
        )

    @classmethod
    def scratch(cls, layers: int, experts: int, device: torch.device) -> Control:
        """One of its own for a step that is only tried: everything is resident, in slot 0."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            table=zeros(layers, experts, dtype=torch.int32),
            clock=zeros(1),
            abort=zeros(1, dtype=torch.int32),
            num_tickets=zeros(1),
            ring=zeros(TICKETS, TICKET_WORDS, dtype=torch.int32),
            uses=zeros(layers, experts),
        )
