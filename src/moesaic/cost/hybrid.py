"""The sizes of models of which some layers keep states of sequences in place of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from moesaic.core.tokens import STATE_CHUNK
from moesaic.cost.sizes import GroupedQuery


class Recurrent(Protocol):
    """A layer with states, counted in numbers. See `sizes.Attention`."""

    @property
    def query(self) -> int: ...

    @property
    def output(self) -> int: ...

    def projection_sizes(self, hidden: int) -> tuple[int, int]: ...

    def state_numbers(self) -> tuple[int, int]:
        """Numbers of a page and of a seat (`kernels.states`)."""
        ...

    def part(self, ranks: int) -> Recurrent:
        """What one of `ranks` ranks has."""
        ...


@dataclass(frozen=True)
class DeltaRule:
    """Gated DeltaNet: heads of linear attention."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    """Width of the convolution before it."""

    @property
    def query(self) -> int:
        return 2 * self._keys + 2 * self._values

    @property
    def output(self) -> int:
        return self._values

    def projection_sizes(self, hidden: int) -> tuple[int, int]:
        return hidden * 2 * (self._keys + self._values + self.value_heads), hidden * self._values

    def state_numbers(self) -> tuple[int, int]:
        tail = (self.taps - 1) * (2 * self._keys + self._values)
        rows = STATE_CHUNK * (self._keys + self._values + self.value_heads)
        return self.key_width * self._values + tail, rows + tail

    def part(self, ranks: int) -> DeltaRule:
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    @property
    def _keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_width


@dataclass(frozen=True)
class ShortConvolution:
    """A gated convolution of a few taps (LFM2), with as many channels as a row has numbers."""

    channels: int
    taps: int

    @property
    def query(self) -> int:
        return 2 * self.channels

    @property
    def output(self) -> int:
        return self.channels

    def projection_sizes(self, hidden: int) -> tuple[int, int]:
        return 3 * hidden * self.channels, hidden * self.channels

    def state_numbers(self) -> tuple[int, int]:
        tail = (self.taps - 1) * self.channels
        return tail, tail

    def part(self, ranks: int) -> ShortConvolution:
        return replace(self, channels=self.channels // ranks)


@dataclass(frozen=True)
class HybridAttention:
    """Layers of two kinds: attention over a cache, and layers with a state of each sequence.

    Every number is the mean over the layers, so that the sums over all layers are right.
    """

    full: GroupedQuery
    share: float
    """Share of the layers with attention over a cache."""
    recurrent: Recurrent
    has_gate: bool = False
    """Whether attention over a cache has a gate as wide as its queries (Qwen3-Next)."""

    @property
    def cache_width(self) -> int:
        return max(1, math.ceil(self.share * self.full.cache_width))

    @property
    def rows(self) -> int:
        return max(1, round(self.share * self.full.rows))

    @property
    def query(self) -> int:
        return round(self._mean(self.full.query + self._gate, self.recurrent.query))

    @property
    def output(self) -> int:
        return round(self._mean(self.full.output, self.recurrent.output))

    @property
    def pair_flops(self) -> int:
        return round(self.share * self.full.pair_flops)

    def projection_sizes(self, hidden: int) -> tuple[int, int]:
        (full_input, full_output), (first, last) = (
            self.full.projection_sizes(hidden),
            self.recurrent.projection_sizes(hidden),
        )
        return round(self._mean(full_input + hidden * self._gate, first)), round(
            self._mean(full_output, last)
        )

    @property
    def _gate(self) -> int:
        return self.full.query if self.has_gate else 0

    def _mean(self, full: float, recurrent: float) -> float:
        return self.share * full + (1 - self.share) * recurrent
