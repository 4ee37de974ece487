"""Memory that experts and the KV cache share, and that is divided anew between steps.

`policy.offloading.dividing` decides. Here is what it may choose from, what it is told about reading, and who
carries its decisions out.

Question: How do experts give way to the KV cache (`--memory-division`)?
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.config import WorkerConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.offload import Division, ExpertReads, Offload
from moesaic.models.conversion import conversion_of
from moesaic.models.headers import Headers
from moesaic.models.kvcache.elastic_kv import ElasticKV, list_lines
from moesaic.models.kvcache.memory import CacheSize
from moesaic.models.pages import HUGE_PAGE, PAGE
from moesaic.models.spec import ModelSpec
from moesaic.offload.elastic_experts import ElasticExperts, read_place_sizes
from moesaic.offload.passes import Passes
from moesaic.policy.offloading.dividing import MemorySizes, list_divisions
from moesaic.policy.offloading.residency import HotExperts

LOG = logging.getLogger(__name__)
LEAST_TOKENS = 2048
"""The cache always has room for a request of so many tokens, or of the maximum length if that is less."""
LEAST_HUGE_PAGES = 16
"""Memory is given back in huge pages where each part of it has at least so many."""
LOG_INTERVAL = 10.0
"""Seconds between two lines about changes, at least."""
MEASURED_STEPS = 8
"""Steps between two measurements."""
KEPT_SHARE = 0.8
"""Weight of earlier measurements beside a new one."""


@dataclass(frozen=True)
class DividedMemory:
    """How memory may be divided. The first division is the planned one."""

    divisions: list[Division]
    page: int
    """Bytes of the pages in which memory is given back."""
    read_bytes: float
    """Mean bytes that are read of one expert."""


def divide_memory(
    config: WorkerConfig,
    path: Path,
    layout: ExpertLayout,
    spec: ModelSpec,
    size: CacheSize,
    kv_dtype: torch.dtype,
    max_model_len: int,
) -> DividedMemory | None:
    """How the memory of a worker may be divided. None: the plan leaves no other way, or wants none."""
    offload, block_size = config.offload, config.cache.block_size
    if offload is None or offload.division is None:
        return None
    places = read_place_sizes(path, layout, conversion_of(Headers(path), layout) is not None)
    lines = tuple(list_lines(spec.kv, spec.kv_layers, block_size, kv_dtype))
    smallest = min(places.own_bytes, *(line * size.num_blocks for line in lines))
    page = HUGE_PAGE if smallest >= LEAST_HUGE_PAGES * HUGE_PAGE else PAGE
    slot = -(-places.own_bytes // page) * page
    sizes = MemorySizes(layout.num_experts, slot, places.largest, lines, page)
    least_blocks = -(-min(max_model_len, LEAST_TOKENS) // block_size)
    planned_division = Division(min(offload.static_experts, layout.num_experts), size.num_blocks)
    divisions = list_divisions(sizes, planned_division, least_blocks)
    if len(divisions) < 2:
        return None
    read_bytes = places.staging or places.own_bytes / len(layout.layers)
    return DividedMemory(divisions, page, read_bytes)


class ReadMeter:
    """Measures what reading experts costs."""

    def __init__(
        self, offload: Offload, division_plan: DividedMemory, hot: HotExperts, passes: Passes
    ) -> None:
        """Until something has been read, the price of the plan counts."""
        assert offload.division is not None
        self._read_bytes, self._hot, self._passes = division_plan.read_bytes, hot, passes
        self._seconds = offload.division.read_seconds
        self._steps = 0
        self._last_bytes, self._last_seconds = 0, 0.0

    def read(self) -> ExpertReads:
        """What reading costs by the measurements so far."""
        return ExpertReads(self._seconds, self._hot.mean_shares())

    def after_step(self) -> ExpertReads | None:
        """What reading costs by the last steps. None: it is not time to measure anew."""
        self._steps += 1
        if self._steps % MEASURED_STEPS:
            return None
        num_bytes, seconds = self._passes.residency.loaded_bytes, self._passes.link_seconds
        num_experts = (num_bytes - self._last_bytes) / self._read_bytes
        if num_experts >= 1:
            measured_seconds = (seconds - self._last_seconds) / num_experts
            self._seconds = KEPT_SHARE * self._seconds + (1 - KEPT_SHARE) * measured_seconds
        self._last_bytes, self._last_seconds = num_bytes, seconds
        return self.read()


class MemoryMover:
    """Carries divisions out. What shrinks gives its memory back before the other takes any."""

    def __init__(
        self,
        experts: ElasticExperts,
        kv: ElasticKV,
        hot: HotExperts,
        passes: Passes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._experts, self._kv, self._hot, self._passes = experts, kv, hot, passes
        self._clock = clock
        self._last_line = -LOG_INTERVAL
        self.changes = 0
        """Number of changes so far."""

    @property
    def residents(self) -> int:
        """Experts of each layer that may stay now."""
        return self._experts.residents

    def divide(self, division: Division) -> None:
        """Divide the memory. No step may run, and no request may use a block that leaves."""
        if division.num_blocks < self._kv.num_blocks:
            self._kv.resize(division.num_blocks)
        self._experts.resize(division.residents, self._hot.heat)
        self._kv.resize(division.num_blocks)
        self._passes.forget_loaded()
        self.changes += 1
        now = self._clock()
        if now - self._last_line >= LOG_INTERVAL:
            self._last_line = now
            LOG.info(
                "memory has %d experts of each layer and %d blocks of the cache after %d changes",
                division.residents,
                division.num_blocks,
                self.changes,
            )
