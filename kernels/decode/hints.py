"""The ring through which kernels of a step name experts that are worth reading ahead; see hints.cuh."""

HINTS, HINT_WORDS = 64, 32
"""Entries of the ring, and int32 words of one: number, is it a guess, layer, clock (2), how many ids, the ids."""
HINTED_WORDS = 3
"""What the GPU counts, int32: hints; missing experts that were guessed, when their layer looks up; those it wants."""
