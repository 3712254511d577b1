"""What to expect of a cache and a machine: hit rate and tokens a second, as ranges with their arithmetic.

Pure numbers. The hit rates are a fit to public reports of engines that stream models of this kind; the speeds are
bytes divided by bandwidth, which is what bounds decoding at batch 1.
"""

from __future__ import annotations

from dataclasses import dataclass

# With a fraction f of the experts cached, 1 - (1 - f)^p of the uses hit. Reports: 46-54 % of uses at f = 0.14, 95 % at
# 0.48, 97-98 % at 0.57, 96 % at 0.66; all lie between these two powers.
HIT_POWERS = (3.0, 5.0)
# Kernels and launches get this part of the bandwidth in the cautious end of the range.
CAUTIOUS_EFFICIENCY = 0.7


@dataclass(frozen=True, slots=True)
class Range:
    """A cautious and a hopeful value."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one decoded token moves. Bytes; bandwidths in bytes a second; `uses` are expert uses per token."""

    dense_bytes: int
    record_bytes: int
    uses: int
    memory_bandwidth: float
    disk_bandwidth: float

    @property
    def memory_bytes(self) -> int:
        return self.dense_bytes + self.uses * self.record_bytes


def hit_rate(cached: float) -> Range:
    """Expected part of expert uses that hit, at steady state, when the part `cached` of all experts is resident."""
    low, high = (1 - (1 - min(1.0, cached)) ** power for power in HIT_POWERS)
    return Range(low, high)


def tokens_per_s(cost: StepCost, hits: Range) -> Range | None:
    """Decoding speed; None if a bandwidth is unknown.

    Cautious: the low hit rate, `CAUTIOUS_EFFICIENCY` of the memory bandwidth, reads after compute. Hopeful: the high
    hit rate, all of the bandwidth, reads hidden under compute.
    """
    if not cost.memory_bandwidth or not cost.disk_bandwidth:
        return None
    compute_s = cost.memory_bytes / cost.memory_bandwidth
    slow_read_s, fast_read_s = (
        cost.uses * (1 - hit) * cost.record_bytes / cost.disk_bandwidth for hit in (hits.low, hits.high)
    )
    return Range(1 / (compute_s / CAUTIOUS_EFFICIENCY + slow_read_s), 1 / max(compute_s, fast_read_s))
