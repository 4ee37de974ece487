"""Places for some of the routed experts of a checkpoint, of which any expert may take any place.

An expert server with more experts than memory keeps the ones that are chosen most often there. It reads the
others when rows need them, as the on-demand schedule of a worker does.
"""

from __future__ import annotations

from collections.abc import Collection
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
        sizes, staging = (ConvertingReader if converts else StoredReader).sizes(plan, layout)
        size = max(sizes.values())
        count = min((fast_memory - whole_blocks(staging)) // size, len(plan.places))
        if count < LEAST:
            least = -(-(LEAST * size + whole_blocks(staging)) // MIB)
            allowed_sizes = f"at least {least}MiB: an expert server needs room for {LEAST} experts"
            got = f"{fast_memory / MIB:.1f}MiB" if fast_memory >= MIB else f"{fast_memory} bytes"
            raise ConfigError.field("--fast-memory", got, allowed_sizes)
        self._layout = layout
        self._files = Files(plan.files, direct)
        arena = Arena(whole_blocks(count * size) + whole_blocks(staging))
        self._free = list(places_of(arena.take(count * size), [size] * count))
        if converts:
            self._reader: ConvertingReader | StoredReader = ConvertingReader(
                plan, layout, self._files, arena.take(staging)
            )
        else:
            self._reader = StoredReader(plan, layout, self._files)
        self.places = count
        """Number of experts for which there is room."""
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

    def load_experts(self, layer: int, expert_ids: Collection[int]) -> ExpertWeights:
        """The experts of a layer that are in memory, after reading those of `expert_ids` that were not.

        expert_ids: at most `places` experts. The coldest experts of all layers leave for them. An earlier
        answer must not be computed from any more.
        """
        places = self._resident[layer]
        missing = [expert for expert in sorted(expert_ids) if expert not in places]
        self._num_chosen += len(expert_ids)
        self._num_hits += len(expert_ids) - len(missing)
        self._make_room(len(missing), {(layer, expert) for expert in expert_ids})
        for expert in missing:
            place = self._free.pop()
            try:
                self._reader.load(layer, expert, place)
            except BaseException:  # also for Ctrl-C: the place would be lost otherwise
                self._free.append(place)
                raise
            places[expert] = place
            self._weights.pop(layer, None)
        if layer not in self._weights:
            self._weights[layer] = weights_in(self._reader, self._layout, layer, places)
        return self._weights[layer]

    def close(self) -> None:
        """Closes the files. May be called more than once."""
        self._files.close()

    def _make_room(self, count: int, required_experts: Collection[Key]) -> None:
        """Frees places until `count` are free."""
        missing = count - len(self._free)
        if missing <= 0:
            return
        resident = ((layer, expert) for layer, experts in self._resident.items() for expert in experts)
        for layer, expert in self._hot.coldest(resident, required_experts, missing):
            self._free.append(self._resident[layer].pop(expert))
            self._weights.pop(layer, None)
            self._num_exchanges += 1
