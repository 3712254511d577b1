"""Which rows of the keys each query attends to, as lists for `sparse_attention`: int32 [m, j], -1 is nothing.

Everything follows from positions and masks on the device; nothing waits for it.
"""

from __future__ import annotations

import torch


def of_ring(position: int, window: int, device: torch.device) -> torch.Tensor:
    """The token at `position` sees every row of the ring that was written, itself included: [1, window]."""
    rows = torch.arange(window, dtype=torch.int32, device=device)
    return rows.masked_fill_(rows > position, -1).unsqueeze(0)


def of_window(position: int, m: int, window: int, device: torch.device) -> torch.Tensor:
    """Tokens `position`.. see themselves and the window - 1 before: [m, window].

    Row 0 of the keys is that of the oldest position in the first token's window, the others follow.
    """
    first = max(0, position - window + 1)
    last = torch.arange(position, position + m, dtype=torch.int32, device=device) - first
    rows = last.unsqueeze(1) + torch.arange(1 - window, 1, dtype=torch.int32, device=device)
    return rows.clamp_(min=-1)


def of_chosen(chosen: torch.Tensor, most: int, offset: int) -> torch.Tensor:
    """The true columns of each row, ascending, with `offset` added: [m, most] or fewer.

    chosen: bool [m, t], true at most `most` times in a row.
    """
    m, t = chosen.shape
    rows = torch.arange(offset, offset + t, dtype=torch.int32, device=chosen.device)
    if t <= most:
        return torch.where(chosen, rows, -1)
    # What is not chosen goes to a column more, which is cut off.
    place = torch.where(chosen, chosen.cumsum(1) - 1, most)
    lists = torch.full((m, most + 1), -1, dtype=torch.int32, device=chosen.device)
    return lists.scatter_(1, place, rows.expand(m, t))[:, :most]
