"""Where a prompt is cut into segments: the pieces that prefill takes and that are kept.

A cut changes the last bits of the result (matrix products of other heights round differently), so it follows from the
request alone and never from what happens to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable


def cut_prompt(num_tokens: int, boundaries: Iterable[int], chunk: int, min_segment: int) -> list[int]:
    """Where each segment of a prompt of `num_tokens` ends, the last at its end.

    Cuts are at the boundaries that lie at least `min_segment` tokens behind the cut before, and `chunk` tokens behind
    it otherwise. No cut depends on what follows it: a prompt that continues another one with the same boundaries has
    all its cuts, but for the end if that is no boundary.
    """
    ends: list[int] = []
    last = 0
    for boundary in sorted({*boundaries, num_tokens}):
        while boundary - last > chunk:
            last += chunk
            ends.append(last)
        if boundary == num_tokens or boundary - last >= min_segment:
            last = boundary
            ends.append(last)
    return ends
