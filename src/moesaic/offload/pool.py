"""Places for some of the routed experts of a checkpoint. Any expert may take any place of its size.

An expert server with more experts than memory keeps the ones that are chosen most often there. It reads the
others when rows need them, as the on-demand schedule of a worker does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ResidencyStats
from moesaic.core.tokens import IntArray
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.conversion import conversion_of
from moesaic.offload.arena import Arena
from moesaic.offload.by_expert import StoredReader, places_of, weights_in, whole_blocks
from moesaic.offload.converted_experts import ConvertingReader
from moesaic.offload.weights import Files, Plan
from moesaic.policy.offloading.residency import HotExperts, Key

MIB = 1 << 20
LEAST = 2
"""Smallest number of places."""


class ExpertPool:
    """Experts in memory of a fixed size. One thread may call it.

    fast_memory: bytes for all places, and for the memory that converted experts pass through. direct: see
    offload.reading.DirectFile.

    Raises ConfigError if there is no room for LEAST experts, and CheckpointError as offload.weights does.
    """

    def __init__(self, path: Path, layout: ExpertLayout, fast_memory: int, direct: bool = True) -> None:
        plan = Plan(path, layout, {}, None)
        converts = conversion_of(plan.headers, layout) is not None
        self._sizes, staging = (ConvertingReader if converts else StoredReader).sizes(plan, layout)
        room, least_bytes = fast_memory - whole_blocks(staging), LEAST * sum(set(self._sizes.values()))
        if room < least_bytes:
            least = -(-(least_bytes + whole_blocks(staging)) // MIB)
            allowed_sizes = f"at least {least}MiB: an expert server needs room for {LEAST} experts"
            got = f"{fast_memory / MIB:.1f}MiB" if fast_memory >= MIB else f"{fast_memory} bytes"
            raise ConfigError.field("--fast-memory", got, allowed_sizes)
        self._layout = layout
        self._files = Files(plan.files, direct)
        numbers_of_experts = Counter(self._sizes[layer] for layer, _ in plan.places)
        self._counts = _share_room(room, numbers_of_experts)
        place_bytes = sum(size * count for size, count in self._counts.items())
        arena = Arena(whole_blocks(place_bytes) + whole_blocks(staging))
        place_sizes = [size for size, count in self._counts.items() for _ in range(count)]
        self._free: dict[int, list[torch.Tensor]] = {size: [] for size in self._counts}
        """Size of a place -> places that are free."""
        for place in places_of(arena.take(place_bytes), place_sizes):
            self._free[len(place)].append(place)
        if converts:
            self._reader: ConvertingReader | StoredReader = ConvertingReader(
                plan, layout, self._files, arena.take(staging)
            )
        else:
            self._reader = StoredReader(plan, layout, self._files)
        self._resident: dict[int, dict[int, torch.Tensor]] = {layer: {} for layer in layout.layers}
        """Layer -> its experts that are in memory -> their places."""
        self._weights: dict[int, ExpertWeights] = {}
        """Layer -> its experts that are in memory, for kernels. A layer that changed has no entry."""
        self._hot = HotExperts(layout.num_experts)
        self._num_chosen = self._num_hits = self._num_exchanges = 0

    @property
    def stats(self) -> ResidencyStats:
        """What runs so far found in memory, and what they read."""
        size, read = self._layout.expert_bytes, self._files.bytes_read
        return ResidencyStats(
            self._num_chosen, self._num_hits, self._num_exchanges, read, self._num_hits * size
        )

    def learn(self, layer: int, pairs: IntArray) -> None:
        """Counts the experts that a run chose. pairs: [p] experts."""
        self._hot.learn(layer, pairs)

    def count_places(self, layer: int) -> int:
        """Number of experts of a layer for which there is room."""
        return self._counts[self._sizes[layer]]

    def load_experts(self, layer: int, expert_ids: Collection[int]) -> ExpertWeights:
        """The experts of a layer that are in memory, after reading those of `expert_ids` that were not.

        expert_ids: at most as many as `count_places` says. The coldest experts of all layers with experts of
        this size leave for them. An earlier answer must not be computed from any more.
        """
        places, free = self._resident[layer], self._free[self._sizes[layer]]
        missing = [expert for expert in sorted(expert_ids) if expert not in places]
        self._num_chosen += len(expert_ids)
        self._num_hits += len(expert_ids) - len(missing)
        self._make_room(self._sizes[layer], len(missing), {(layer, expert) for expert in expert_ids})
        new_places = {(layer, expert): free.pop() for expert in missing}
        try:
            self._reader.load_all(new_places)
        except BaseException:  # also for Ctrl-C: the places would be lost otherwise
            free.extend(new_places.values())
            raise
        if missing:
            places.update({expert: place for (_, expert), place in new_places.items()})
            self._weights.pop(layer, None)
        if layer not in self._weights:
            self._weights[layer] = weights_in(self._reader, self._layout, layer, places)
        return self._weights[layer]

    def close(self) -> None:
        """Closes the files. May be called more than once."""
        self._files.close()

    def _make_room(self, size: int, count: int, required_experts: Collection[Key]) -> None:
        """Frees places of a size until `count` are free."""
        free = self._free[size]
        missing = count - len(free)
        if missing <= 0:
            return
        resident = (
            (layer, expert)
            for layer, experts in self._resident.items()
            if self._sizes[layer] == size
            for expert in experts
        )
        for layer, expert in self._hot.coldest(resident, required_experts, missing):
            free.append(self._resident[layer].pop(expert))
            self._weights.pop(layer, None)
            self._num_exchanges += 1


def _share_room(room: int, numbers_of_experts: Mapping[int, int]) -> dict[int, int]:
    """Size of a place -> number of places. Each size gets LEAST places and the same share of the others.

    room: bytes of all places. numbers_of_experts: size -> number of experts of this size.

    >>> _share_room(100, {10: 50}), _share_room(100, {10: 3}), _share_room(100, {10: 8, 20: 8})
    ({10: 10}, {10: 3}, {10: 3, 20: 3})
    """
    left = room - LEAST * sum(numbers_of_experts)
    others = {size: max(number - LEAST, 0) for size, number in numbers_of_experts.items()}
    total = sum(size * number for size, number in others.items())
    return {
        size: min(LEAST + left * number // max(total, 1), numbers_of_experts[size])
        for size, number in others.items()
    }
