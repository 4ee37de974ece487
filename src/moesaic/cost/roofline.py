"""The hierarchical roofline model (MoE-Lightning, section 3.2, Equations 4 to 11).

It predicts the speed of an operation from the level that computes it and the level that has its data. Level
i computes. The slower level j has data that operation x needs. I_i are x's flops for each byte that is read
at level i. I_j are its flops for each byte that is fetched from level j.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.cost.hardware import Hardware, Level
from moesaic.cost.ops import Work


def seconds(work: Work, level: Level, efficiency: float = 1.0) -> float:
    """Seconds of an operation with data on the level that computes (Equation 8): the slower of its roofs.

    If the processor does not fully overlap both, a part of the faster roof is added. efficiency: share of
    the processor's peak that the operation reaches. Raises ValueError if the level has no processor.

    Example: 4 flops and 6 bytes at 1 flop/s and 2 bytes/s. Computing takes 4 s and reading 3 s. Together
    they take 4 s, or 5.5 s with an overlap of 0.5.
    """
    if level.processor is None:
        raise ValueError(f"no processor computes on {level.name}")
    computing, reading = work.flops / (level.processor.flops * efficiency), work.bytes / level.bandwidth
    return max(computing, reading) + (1 - level.processor.overlap) * min(computing, reading)


def seconds_with_experts(
    other_work: Work,
    expert_work: Work,
    rows: float,
    level: Level,
    efficiency: float = 1.0,
    dtype: str | None = None,
) -> float:
    """Seconds of routed experts with a mean of `rows` rows each, and of the `other_work` of a task.

    If the experts' rate was measured, it is used for them, and `efficiency` only for `other_work`. dtype:
    their type if they are quantised.
    """
    if level.processor is None or not level.processor.rates(dtype) or not expert_work.flops:
        return seconds(other_work + expert_work, level, efficiency)
    return seconds(other_work, level, efficiency) + expert_work.flops / level.processor.experts_flops(
        rows, dtype
    )


def attention_seconds(work: Work, level: Level) -> float:
    """Seconds of attention to cached tokens on the same level, with one row for each request."""
    return seconds(work, level) / (level.processor.attention if level.processor else 1.0)


@dataclass(frozen=True)
class Roofs:
    """The roofs of two levels and the link between them, in flops/s and bytes/s."""

    peak_i: float
    bandwidth_i: float
    peak_j: float
    bandwidth_j: float
    link: float

    @classmethod
    def from_hardware(cls, hardware: Hardware) -> Roofs:
        """The roofs of a machine. If the slow level has no processor, its peak is 0.

        Raises ValueError if the fast level has no processor.
        """
        fast, slow = hardware.fast, hardware.slow
        if fast.processor is None:
            raise ValueError(f"no processor computes on {fast.name}")
        peak_j = slow.processor.flops if slow.processor else 0.0
        return cls(fast.processor.flops, fast.bandwidth, peak_j, slow.bandwidth, hardware.link.down_bandwidth)

    def at_i(self, intensity: float) -> float:
        """Flops/s on level i for data on level i (Equations 4, 5, 8)."""
        return min(self.peak_i, self.bandwidth_i * intensity)

    def at_j(self, intensity: float) -> float:
        """Flops/s on level j for data on level j."""
        return min(self.peak_j, self.bandwidth_j * intensity)

    def fetch_flops(self, intensity_i: float, intensity_j: float) -> float:
        """Flops/s on level i for data that is fetched from level j (Equations 6, 7)."""
        return min(self.at_i(intensity_i), self.link * intensity_j)

    def fetch_pays(self, intensity_j: float) -> bool:
        """True if an operation with data on level j can be faster on level i than on level j."""
        return self.link * intensity_j > self.at_j(intensity_j)

    @property
    def p1(self) -> float:
        """I_j below which fetching never pays (Equation 9).

        There the link's roof crosses level j's own roof. It is 0 if the link is at least as fast as level
        j's memory, or if nothing computes on level j.
        """
        if self.link >= self.bandwidth_j:
            return 0.0
        return self.peak_j / self.link

    def p2(self, intensity_i: float) -> float:
        """I_j below which the link limits an operation that has intensity_i on level i (Equation 10)."""
        return self.at_i(intensity_i) / self.link

    def balance(self, intensity_i: float) -> float:
        """I_j at which level i's memory and the link take equally long (Equation 11).

        Beyond it a larger batch alone does not help, since I_i has to grow as well. If level i computes at
        its peak, this point is beyond P2.
        """
        return self.bandwidth_i * intensity_i / self.link
