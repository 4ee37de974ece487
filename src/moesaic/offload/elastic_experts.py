"""Routed experts of which more or fewer stay, while memory is divided anew between them and the KV cache.

Each layer has places of its own, of which there are as many as experts may stay. Place i of all layers
together is one range of memory, so that it can be given back as a whole. The other experts share the two
slots, as everywhere in this folder: each of them has a place in both.

A place of its own that is new is empty. The next expert of its layer that is loaded is loaded there, and
stays. So nothing is read because of a change: an expert is read when a step needs it, as before. Where places
leave, those that are empty leave first, and then the coldest experts. An expert whose place leaves while it
stays is copied to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.pages import PAGE, ReservedMemory
from moesaic.offload.by_expert import Exchange, StoredReader, StreamedByExpert, whole_blocks
from moesaic.offload.converted_experts import ConvertingReader, StreamedConvertedExperts
from moesaic.offload.weights import Files, Memory, Plan

Heat = Callable[[int], Sequence[float]]
"""Layer -> [E] how often each of its experts was chosen."""


@dataclass(frozen=True)
class PlaceSizes:
    """Bytes of places of experts."""

    by_layer: Mapping[int, int]
    staging: int
    """Bytes that reading needs beside places."""

    @property
    def own_bytes(self) -> int:
        """A place of its own in each layer."""
        return sum(self.by_layer.values())

    @property
    def largest(self) -> int:
        """A place of the layer with the largest experts."""
        return max(self.by_layer.values())


def read_place_sizes(path: Path, layout: ExpertLayout, converts: bool) -> PlaceSizes:
    """The sizes of places for a checkpoint. converts: whether experts are converted when they are loaded."""
    plan = Plan(path, layout, {}, None)
    sizes, staging = (ConvertingReader if converts else StoredReader).sizes(plan, layout)
    return PlaceSizes(sizes, staging)


class ElasticExperts(StreamedByExpert):
    """Streamed experts of which more or fewer stay. The arguments beside those of StreamedExperts:

    least, most_residents: places of each layer's own, between which `resize` chooses. At first there are
    `least`. page: bytes of the pages in which memory is given back, as in `pages.ReservedMemory`.
    """

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        least: int,
        most_residents: int,
        page: int = PAGE,
    ) -> None:
        """Raises ConfigError where there are not enough addresses, and as StreamedExperts does."""
        if not 0 <= least <= most_residents <= layout.num_experts or any(
            map(least.__lt__, map(len, static.values()))
        ):
            raise ValueError(
                f"{least} to {most_residents} places for {max(map(len, static.values()), default=0)} experts"
            )
        self._plan = Plan(path, layout, static, None)
        self._num_experts, self._page = layout.num_experts, page
        self._least, self._most_residents, self._residents = least, most_residents, least
        sizes = self._sizes_of(self._plan, layout)
        self._place_bytes, self._largest = sizes.by_layer, sizes.largest
        self._own_bytes = _round_up(sizes.own_bytes, page)
        self._shared_begin = _round_up(layout.num_experts * sizes.largest, page)
        try:
            self._own_memory = ReservedMemory(most_residents * self._own_bytes, page)
            self._shared_memory = ReservedMemory(2 * self._shared_begin, page)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--memory-division: got 'follow'; allowed: fixed where memory cannot be reserved ({error})"
            ) from error
        self._files = Files(self._plan.files)
        self._staging = torch.from_numpy(ReservedMemory(whole_blocks(max(1, sizes.staging)), PAGE).array)
        offsets = [0, *accumulate(sizes.by_layer[layer] for layer in layout.layers)]
        self._offsets = dict(zip(layout.layers, offsets, strict=False))
        """Where a layer's place begins in each range of places."""
        self._last_count: dict[int, int] = {}
        """Layer -> the turn at which its pages were loaded last."""
        self._loaded_experts: dict[int, set[int]] = {layer: set() for layer in layout.layers}
        """Layer -> experts that were loaded to places of its own, and do not stay yet."""
        self._dirty: set[int] = set()
        """Layers of which `_experts` is not up to date."""
        self._experts = self._lay_out(layout)

    @property
    def memory_in_use(self) -> Memory:
        """How many bytes the experts use now, in whole pages."""
        slot = _round_up((self._num_experts - self._residents) * self._largest, self._page)
        return Memory(self._residents * self._own_bytes, slot, len(self._staging))

    @property
    def residents(self) -> int:
        """Places of each layer's own, for experts that stay."""
        return self._residents

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        if not 0 <= page < pages:
            raise ValueError(f"page {page} of {pages}")
        # What a page brings stays from the next turn on, so that all pages of a turn divide the same experts.
        if self._last_count.get(layer) != count:
            self._settle(layer)
            self._last_count[layer] = count
        streamed_experts = self._plan.list_streamed(layer)
        first, last = (number * len(streamed_experts) // pages for number in (page, page + 1))
        return self._load(count, layer, streamed_experts[first:last])

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        """Reads these experts, except static ones, as many as possible to places of the layer's own. Those
        stay from now on."""
        self._settle(layer)
        size = self._load(count, layer, experts)
        self._settle(layer)
        return size

    def replace_experts(
        self, layer: int, exchanges: Sequence[Exchange], count: int = 0, loaded_experts: Collection[int] = ()
    ) -> int:
        """Brings experts to places of the layer's own, first to empty ones and then to those of others.

        All of them stay from now on. No other thread may compute this layer meanwhile.
        """
        self._settle(layer)
        own_places, shared_places = self._own_places[layer], self._shared_places[layer]
        # What the pages of a turn brought has come to stay just now, unseen by the caller.
        exchanges = [pair for pair in exchanges if pair[1] not in self.static[layer]]
        num_empty = len(own_places) - len(self.static[layer])
        size = self._load(0, layer, [new for _, new in exchanges[:num_empty]])
        self._settle(layer)
        size += super().replace_experts(layer, exchanges[num_empty:], count, loaded_experts)
        for evicted_expert, new_expert in exchanges[num_empty:]:
            own_places[new_expert] = own_places.pop(evicted_expert)
            shared_places[evicted_expert] = shared_places.pop(new_expert)
        return size

    def resize(self, residents: int, heat: Heat) -> None:
        """Has so many places of each layer's own from now on. No step may run meanwhile.

        What was loaded to the slots must be loaded again. Raises ValueError for more or fewer than allowed.
        """
        if not self._least <= residents <= self._most_residents:
            raise ValueError(
                f"got {residents} places of each layer; allowed: {self._least} to {self._most_residents}"
            )
        old_memory = self.memory_in_use
        for layer in self._layout.layers:
            self._settle(layer)
            if residents < self._residents:
                self._drop_places(layer, residents, heat(layer))
            else:
                self._add_places(layer, residents, heat(layer))
        self._residents = residents
        new_memory = self.memory_in_use
        self._own_memory.give_back(new_memory.static, old_memory.static)
        for begin in (0, self._shared_begin):
            self._shared_memory.give_back(begin + new_memory.slot, begin + old_memory.slot)
        for layer in self._layout.layers:
            self._assign(layer)
        self._dirty.update(self._layout.layers)

    def experts(self, count: int, layer: int) -> ExpertWeights:
        if layer in self._dirty:
            self._experts.update({(layer, slot): self._weights(layer, slot) for slot in (0, 1)})
            self._dirty.discard(layer)
        return super().experts(count, layer)

    # ---- which expert has which place

    def _drop_places(self, layer: int, residents: int, heat: Sequence[float]) -> None:
        """Lets experts share the slots until no place from `residents` on is anyone's."""
        own_places, static = self._own_places[layer], self.static[layer]
        order = sorted(own_places, key=lambda expert: (expert in static, heat[expert], expert))
        shared_index = self._num_experts - self._residents
        free = []
        for expert in order[: self._residents - residents]:
            free.append(own_places.pop(expert))
            self._shared_places[layer][expert] = shared_index
            shared_index += 1
            self._stream(layer, expert)
        targets = sorted(index for index in free if index < residents)
        for expert, index in list(own_places.items()):
            if index >= residents:
                target = targets.pop()
                if expert in self.static[layer]:
                    self._own_place(layer, target).copy_(self._own_place(layer, index))
                own_places[expert] = target

    def _add_places(self, layer: int, residents: int, heat: Sequence[float]) -> None:
        """Gives the new places to the hottest experts that share the slots. They are empty for now."""
        own_places, shared_places = self._own_places[layer], self._shared_places[layer]
        order = sorted(shared_places, key=lambda expert: (-heat[expert], expert))
        for index, expert in zip(range(self._residents, residents), order, strict=False):
            own_places[expert] = index
            del shared_places[expert]
        for index, expert in enumerate(sorted(shared_places, key=shared_places.__getitem__)):
            shared_places[expert] = index

    def _give_own_places(self, layer: int, experts: Sequence[int]) -> None:
        """Gives empty places of the layer's own to experts that are about to be loaded."""
        own_places, shared_places, static = (
            self._own_places[layer],
            self._shared_places[layer],
            self.static[layer],
        )
        if len(own_places) == len(static):
            return
        kept_experts = static | self._loaded_experts[layer] | set(experts)
        other_experts = [expert for expert in own_places if expert not in kept_experts]
        comers = [expert for expert in experts if expert in shared_places]
        for comer, other_expert in zip(comers, other_experts, strict=False):
            own_places[comer], shared_places[other_expert] = (
                own_places.pop(other_expert),
                shared_places.pop(comer),
            )
            self._dirty.add(layer)
        if comers and other_experts:
            self._assign(layer)

    def _load(self, count: int, layer: int, experts: Iterable[int]) -> int:
        """Reads experts that do not stay, as many as possible to places of the layer's own."""
        missing_experts = [
            int(expert) for expert in experts if (layer, int(expert)) not in self._static_places
        ]
        self._give_own_places(layer, missing_experts)
        size = super().load_chosen(count, layer, missing_experts)
        own_places = self._own_places[layer]
        self._loaded_experts[layer].update(expert for expert in missing_experts if expert in own_places)
        return size

    def _settle(self, layer: int) -> None:
        """Has all experts stay that were loaded to places of the layer's own."""
        for expert in self._loaded_experts[layer]:
            self._plan.static_keys.add((layer, expert))
            self._static_places[layer, expert] = self._streamed_places[layer].pop(expert)[0]
        if self._loaded_experts[layer]:
            self.static[layer] = self.static[layer] | self._loaded_experts[layer]
            self._loaded_experts[layer].clear()

    def _stream(self, layer: int, expert: int) -> None:
        """Has an expert stay no more."""
        self._plan.static_keys.discard((layer, expert))
        self._static_places.pop((layer, expert), None)
        self.static[layer] = self.static[layer] - {expert}

    # ---- memory

    def _sizes_of(self, plan: Plan, layout: ExpertLayout) -> PlaceSizes:
        return PlaceSizes(*StoredReader.sizes(plan, layout))

    def _own_place(self, layer: int, index: int) -> torch.Tensor:
        begin = index * self._own_bytes + self._offsets[layer]
        return torch.from_numpy(self._own_memory.array[begin : begin + self._place_bytes[layer]])

    def _slot_place(self, layer: int, slot: int, index: int) -> torch.Tensor:
        size = self._place_bytes[layer]
        begin = slot * self._shared_begin + index * size
        return torch.from_numpy(self._shared_memory.array[begin : begin + size])

    def _assign(self, layer: int) -> None:
        """Makes the places of all experts of a layer by their numbers."""
        streamed_places = {
            expert: [self._slot_place(layer, slot, index) for slot in (0, 1)]
            for expert, index in self._shared_places[layer].items()
        }
        for expert, index in self._own_places[layer].items():
            place = self._own_place(layer, index)
            if expert in self.static[layer]:
                self._static_places[layer, expert] = place
            else:
                streamed_places[expert] = [place, place]
        self._streamed_places[layer] = streamed_places

    def _lay_out(self, layout: ExpertLayout) -> dict[tuple[int, int], ExpertWeights]:
        self._layout = layout
        self._reader, _ = self._create_reader(layout)
        self._static_places, self._streamed_places = {}, {}
        self.static = {}
        self._own_places: dict[int, dict[int, int]] = {}
        """Layer -> experts with a place of the layer's own -> its number."""
        self._shared_places: dict[int, dict[int, int]] = {}
        """Layer -> the other experts -> the number of its place in both slots."""
        for layer in layout.layers:
            static = sorted(expert for key, expert in self._plan.static_keys if key == layer)
            other_experts = [expert for expert in range(layout.num_experts) if expert not in static]
            num_empty = self._residents - len(static)
            owners = [*static, *other_experts[:num_empty]]
            self._own_places[layer] = {expert: index for index, expert in enumerate(owners)}
            self._shared_places[layer] = {
                expert: index for index, expert in enumerate(other_experts[num_empty:])
            }
            self.static[layer] = frozenset(static)
            self._assign(layer)
        return {(layer, slot): self._weights(layer, slot) for layer in layout.layers for slot in (0, 1)}


class ElasticConvertedExperts(ElasticExperts, StreamedConvertedExperts):
    """Elastic experts that are converted on their way to memory."""

    def _sizes_of(self, plan: Plan, layout: ExpertLayout) -> PlaceSizes:
        return PlaceSizes(*ConvertingReader.sizes(plan, layout))


def _round_up(size: int, page: int) -> int:
    return -(-size // page) * page
