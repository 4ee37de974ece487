"""The hierarchical roofline model: the speed of an operation by where it runs and where its data comes
from.

MoE-Lightning, section 3.2, Equations 4 to 11. Level i computes; the slower level j holds data that
operation x needs. I_i and I_j are x's flops for each byte that is read at level i, and fetched from level
j.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.cost.hardware import Hardware, Level
from moesaic.cost.ops import Work


def seconds(work: Work, level: Level, efficiency: float = 1.0) -> float:
    """Seconds of an operation whose data is on the level that computes (Equation 8): the slower of its
    roofs.

    If the processor does not overlap both, a part of the faster roof is added. efficiency: share of the
    processor's peak that the operation reaches. Raises ValueError if nothing computes.

    Example: 4 flops and 6 bytes at 1 flop/s and 2 bytes/s: 4 s of computing, 3 s of reading; 4 s in all,
    and with an overlap of 0.5 5.5 s.
    """
    if level.processor is None:
        raise ValueError(f"nothing computes beside {level.name}")
    computing, reading = work.flops / (level.processor.flops * efficiency), work.bytes / level.bandwidth
    return max(computing, reading) + (1 - level.processor.overlap) * min(computing, reading)


def seconds_with_experts(
    beside: Work, routed: Work, rows: float, level: Level, efficiency: float = 1.0
) -> float:
    """Seconds of routed experts with a mean of `rows` rows each, and of the work `beside` them.

    If the experts' rate was measured, it is used for them, and `efficiency` for the rest.
    """
    if level.processor is None or not level.processor.experts or not routed.flops:
        return seconds(beside + routed, level, efficiency)
    return seconds(beside, level, efficiency) + routed.flops / level.processor.experts_flops(rows)


def attention_seconds(work: Work, level: Level) -> float:
    """Seconds of attention to cached tokens on the same level, with one row for each request."""
    return seconds(work, level) / (level.processor.attention if level.processor else 1.0)


@dataclass(frozen=True)
class Roofs:
    """Two levels and the link between them, in flops/s and bytes/s."""

    peak_i: float
    bandwidth_i: float
    peak_j: float
    bandwidth_j: float
    link: float

    @classmethod
    def of(cls, hardware: Hardware) -> Roofs:
        """The roofs of a machine. Raises ValueError if the fast level has no processor. A slow level
        without one has peak 0."""
        fast, slow = hardware.fast, hardware.slow
        if fast.processor is None:
            raise ValueError(f"nothing computes beside {fast.name}")
        peak_j = slow.processor.flops if slow.processor else 0.0
        return cls(fast.processor.flops, fast.bandwidth, peak_j, slow.bandwidth, hardware.link.down)

    def at_i(self, intensity: float) -> float:
        """Flops/s on level i with data there (Equations 4, 5, 8)."""
        return min(self.peak_i, self.bandwidth_i * intensity)

    def at_j(self, intensity: float) -> float:
        """Flops/s on level j with data there."""
        return min(self.peak_j, self.bandwidth_j * intensity)

    def fetched(self, intensity_i: float, intensity_j: float) -> float:
        """Flops/s on level i with data fetched from j (Equations 6, 7)."""
        return min(self.at_i(intensity_i), self.link * intensity_j)

    def fetch_pays(self, intensity_j: float) -> bool:
        """True if computing on i can be faster than computing on j, for an operation whose data is on j."""
        return self.link * intensity_j > self.at_j(intensity_j)

    @property
    def p1(self) -> float:
        """I_j below which fetching never pays (Equation 9): the link's roof crosses level j's own roof.

        0 if the link is at least as fast as level j's memory, or if nothing computes on j.
        """
        if self.link >= self.bandwidth_j:
            return 0.0
        return self.peak_j / self.link

    def p2(self, intensity_i: float) -> float:
        """I_j below which the link limits an operation that has intensity_i on level i (Equation 10)."""
        return self.at_i(intensity_i) / self.link

    def balance(self, intensity_i: float) -> float:
        """I_j at which level i's memory and the link take equally long (Equation 11).

        Beyond it a larger batch alone does not help: I_i has to grow as well. If level i computes at its
        peak, it is beyond P2.
        """
        return self.bandwidth_i * intensity_i / self.link
