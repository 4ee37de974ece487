"""Routed experts that are read one at a time, each to a place of its own.

All places of a layer have one size, so any of its experts can take the place of another one. An expert that
is chosen often can then stay on the fast level, in the place of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from moesaic.core.experts import ExpertLayout
from moesaic.kernels.weights import ExpertWeights
from moesaic.offload.arrangement import Arrangement
from moesaic.offload.reading import ALIGNMENT
from moesaic.offload.weights import Files, Memory, Plan, StreamedExperts, views, weights_of

Key = tuple[int, int]
"""A layer and one of its experts."""
Exchange = tuple[int, int]
"""An expert that stayed until now, and the one of its layer that stays in its place."""
Expert = tuple[torch.Tensor, ...]
"""Gate, up and down, and their biases if there are some."""


class Reader(Protocol):
    """Reads experts of one checkpoint. One thread may call it."""

    def load(self, layer: int, expert: int, place: torch.Tensor) -> int:
        """Reads an expert to its place, [bytes] uint8. Returns the number of bytes read."""
        ...

    def load_all(self, places: Mapping[Key, torch.Tensor]) -> int:
        """Reads several experts. places: (layer, expert) -> its place. Returns the number of bytes read."""
        return sum(self.load(*key, place) for key, place in places.items())

    def tensors(self, layer: int, expert: int, place: torch.Tensor) -> Expert:
        """The tensors of an expert that is in this place."""
        ...


class StoredReader(Reader):
    """Reads experts that are stored as the kernels read them: a place has whole blocks of the file."""

    def __init__(self, plan: Plan, layout: ExpertLayout, files: Files) -> None:
        self._places, self._files = plan.places, files

    @staticmethod
    def sizes(plan: Plan, layout: ExpertLayout) -> tuple[dict[int, int], int]:
        """Layer -> bytes of a place for any of its experts, and bytes that reading needs beside it."""
        sizes = dict.fromkeys(layout.layers, 0)
        for (layer, _), parts in plan.places.items():
            sizes[layer] = max(sizes[layer], Arrangement(parts).size)
        return sizes, 0

    def load(self, layer: int, expert: int, place: torch.Tensor) -> int:
        return self.load_all({(layer, expert): place})

    def load_all(self, places: Mapping[Key, torch.Tensor]) -> int:
        """Reads experts with several reads in flight."""
        reads: list[Callable[[], int]] = []
        for key, place in places.items():
            arrangement = Arrangement(self._places[key])
            reads += self._files.list_reads(arrangement, [(0, arrangement.size)], place)
        return self._files.run(reads)

    def tensors(self, layer: int, expert: int, place: torch.Tensor) -> Expert:
        parts = self._places[layer, expert]
        tensor_views = views(Arrangement(parts), place)
        return tuple(tensor_views[part] for part in parts)


class StreamedByExpert(StreamedExperts):
    """Routed experts that are read one at a time, on a CPU over a disk. The arguments are those of
    StreamedExperts.

    A page is a number of whole experts. `replace_experts` may change which experts stay.
    """

    def load_static(self) -> int:
        return self._reader.load_all(dict(sorted(self._static_places.items())))

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        if not 0 <= page < pages:
            raise ValueError(f"page {page} of {pages}")
        streamed_experts = self._plan.list_streamed(layer)
        first, last = (number * len(streamed_experts) // pages for number in (page, page + 1))
        return self.load_chosen(count, layer, streamed_experts[first:last])

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        places = self._streamed_places[layer]
        missing_experts = sorted(
            {int(expert) for expert in experts if (layer, int(expert)) not in self._static_places}
        )
        return self._reader.load_all(
            {(layer, expert): places[expert][count % 2] for expert in missing_experts}
        )

    def replace_experts(
        self, layer: int, exchanges: Sequence[Exchange], count: int = 0, loaded_experts: Collection[int] = ()
    ) -> int:
        """Brings experts to the places of others, which stayed until now. Returns the bytes read.

        From now on the new ones stay and the others are streamed. loaded_experts: those in the slot of turn
        `count`, which are copied from there. The others are read. No other thread may compute this layer
        meanwhile.
        """
        if not exchanges:
            return 0
        # All places of a layer have one size, so a new expert takes over the place, and leaves its slots to
        # the old one.
        places = {(layer, new): self._static_places[layer, evicted] for evicted, new in exchanges}
        for (_, expert), place in places.items():
            if expert in loaded_experts:
                place.copy_(self._streamed_places[layer][expert][count % 2])
        size = self._reader.load_all(
            {key: place for key, place in places.items() if key[1] not in loaded_experts}
        )
        for evicted_expert, new_expert in exchanges:
            self._streamed_places[layer][evicted_expert] = self._streamed_places[layer].pop(new_expert)
            del self._static_places[layer, evicted_expert]
            self._plan.static_keys ^= {(layer, evicted_expert), (layer, new_expert)}
            self.static[layer] = self.static[layer] - {evicted_expert} | {new_expert}
        self._static_places |= places
        self._experts.update({(layer, slot): self._weights(layer, slot) for slot in (0, 1)})
        return size

    @staticmethod
    def _memory(plan: Plan, layout: ExpertLayout) -> Memory:
        return memory_of(plan, layout, *StoredReader.sizes(plan, layout))

    def _create_reader(self, layout: ExpertLayout) -> tuple[Reader, dict[int, int]]:
        """The reader, and the bytes of a place by layer."""
        return StoredReader(self._plan, layout, self._files), StoredReader.sizes(self._plan, layout)[0]

    def _lay_out(self, layout: ExpertLayout) -> dict[tuple[int, int], ExpertWeights]:
        self._layout = layout
        self._reader, sizes = self._create_reader(layout)
        static_keys = sorted(self._plan.static_keys)
        static_places = places_of(self._static, [sizes[layer] for layer, _ in static_keys])
        self._static_places = dict(zip(static_keys, static_places, strict=True))
        self._streamed_places = {}
        for layer in layout.layers:
            experts = self._plan.list_streamed(layer)
            slots = [places_of(slot, [sizes[layer]] * len(experts)) for slot in self._slots]
            self._streamed_places[layer] = {
                expert: slot_places for expert, *slot_places in zip(experts, *slots, strict=True)
            }
        self.static = {layer: frozenset(self._select_static_places(layer)) for layer in layout.layers}
        """Layer -> the experts that stay now."""
        return {(layer, slot): self._weights(layer, slot) for layer in layout.layers for slot in (0, 1)}

    def _select_static_places(self, layer: int) -> dict[int, torch.Tensor]:
        return {
            expert: place
            for (static_layer, expert), place in self._static_places.items()
            if static_layer == layer
        }

    def _weights(self, layer: int, slot: int) -> ExpertWeights:
        slot_places = {expert: slots[slot] for expert, slots in self._streamed_places[layer].items()}
        return weights_in(self._reader, self._layout, layer, self._select_static_places(layer) | slot_places)


def weights_in(
    reader: Reader, layout: ExpertLayout, layer: int, places: Mapping[int, torch.Tensor]
) -> ExpertWeights:
    """The experts of a layer that are in these places. places: expert -> its place."""
    tensors = {expert: reader.tensors(layer, expert, place) for expert, place in places.items()}
    return weights_of(layout, layer, tensors)


def memory_of(plan: Plan, layout: ExpertLayout, sizes: Mapping[int, int], staging: int) -> Memory:
    """The memory of experts that stay and of two slots. sizes: layer -> bytes of a place for its experts."""
    static = sum(sizes[layer] for layer, _ in plan.static_keys)
    slot = max(len(plan.list_streamed(layer)) * sizes[layer] for layer in layout.layers)
    return Memory(whole_blocks(static), whole_blocks(slot), staging)


def whole_blocks(size: int) -> int:
    """The next multiple of a block, which direct reads need."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def places_of(memory: torch.Tensor, sizes: Iterable[int]) -> Iterator[torch.Tensor]:
    """Places of these sizes in bytes, one after another in `memory`."""
    begin = 0
    for size in sizes:
        yield memory[begin : begin + size]
        begin += size
