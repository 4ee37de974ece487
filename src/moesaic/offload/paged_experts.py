"""Routed experts in a GPU's memory, each in a place of its own, over files in RAM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moesaic.core.experts import PARTS, ExpertLayout
from moesaic.kernels import weights
from moesaic.kernels.weights import DeviceTable, ExpertWeights
from moesaic.models.conversion import conversion_of
from moesaic.offload.by_expert import Exchange, Expert, Reader, StreamedByExpert, memory_of
from moesaic.offload.converted_experts import ConvertingReader, dense_expert, dense_sizes
from moesaic.offload.device import DeviceLink, DeviceMemory, pinned_memory
from moesaic.offload.link import Link
from moesaic.offload.weights import Files, Memory, Plan

BUFFERS = 2
"""Experts in pinned memory: one is copied to the device while the next one is read."""


class PageTable:
    """The addresses of the matrices of a layer's experts on the device, 0 for an expert that is not there.

    An expert is computed from where it lies, so its matrices are never copied together. The kernels of a step
    read the table when they run. So it may only be changed in turn with them, on the same stream.
    """

    def __init__(self, num_experts: int, parts: int, device: torch.device) -> None:
        """parts: tensors of an expert, 3 or all of `kernels.weights.PARTS`."""
        assert parts in (3, len(weights.PARTS))
        self._host_table = torch.zeros(parts, num_experts, dtype=torch.int64, pin_memory=True)
        self._device_table = torch.zeros(parts, num_experts, dtype=torch.int64, device=device)
        self._placed_experts: ExpertWeights | None = None
        self._resident_experts: Collection[int] = ()
        self._addresses = np.zeros((parts, num_experts), np.int64)
        self._pages: DeviceTable | None = None
        self._weights: ExpertWeights | None = None

    def select_experts(
        self, placed_experts: ExpertWeights, resident_experts: frozenset[int]
    ) -> ExpertWeights:
        """The experts `resident_experts`, with this table, which has them and no others from now on.

        placed_experts: all experts that have a place, whether they are there now or not. The device's copy is
        written only if something changed. By then the one before must have been made.
        """
        if (
            self._weights is None
            or placed_experts is not self._placed_experts
            or resident_experts != self._resident_experts
        ):
            if placed_experts is not self._placed_experts or self._pages is None:
                self._addresses[:] = placed_experts.addresses
                self._pages = placed_experts.table_over(self._device_table)
            mask = np.zeros(self._addresses.shape[1], bool)
            mask[list(resident_experts)] = True
            np.multiply(self._addresses, mask, out=self._host_table.numpy())
            self._device_table.copy_(self._host_table, non_blocking=True)
            self._placed_experts, self._resident_experts = placed_experts, resident_experts
            self._weights = replace(placed_experts.select(resident_experts), page_table=self._pages)
        return self._weights


class PagedExperts(StreamedByExpert):
    """Streamed experts on a device, each in a place of its own. `experts` has those that are there, with a
    page table.

    Experts that the files do not have as the kernels read them are converted in RAM, on their way to pinned
    memory. Raises the same errors as Streamed.
    """

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        memory: DeviceMemory,
        load_link: DeviceLink,
        owned_experts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._load_link = load_link
        self._loaded_experts: list[tuple[tuple[int, int], set[int]]] = [((-1, -1), set()), ((-1, -1), set())]
        """The turn and layer that were loaded to each slot last, and their experts that are there."""
        super().__init__(path, layout, static, memory, link=Link(), owned_experts=owned_experts)
        device = self._slots[0].device
        self._tables = {
            key: PageTable(layout.num_experts, PARTS[layout.form], device) for key in self._experts
        }

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        expert_ids = [int(expert) for expert in experts]
        key, slot_experts = self._loaded_experts[count % 2]
        if key != (count, layer):
            slot_experts = set()
            self._loaded_experts[count % 2] = (count, layer), slot_experts
        slot_experts.difference_update(expert_ids)  # until they have been loaded
        size = super().load_chosen(count, layer, expert_ids)
        slot_experts.update(expert_ids)
        return size

    def replace_experts(
        self, layer: int, exchanges: Sequence[Exchange], count: int = 0, loaded_experts: Collection[int] = ()
    ) -> int:
        for (_, slot_layer), slot_experts in self._loaded_experts:
            if slot_layer == layer:
                # An expert that leaves gets the slots of the new one.
                slot_experts.difference_update(expert for exchange in exchanges for expert in exchange)
        return super().replace_experts(layer, exchanges, count, loaded_experts)

    def experts(self, count: int, layer: int) -> ExpertWeights:
        """The experts of a layer that are there at its turn `count`. Only the fast processor's thread may
        ask."""
        key, slot_experts = self._loaded_experts[count % 2]
        resident_experts = self.static[layer].union(slot_experts if key == (count, layer) else ())
        slot = layer, count % 2
        return self._tables[slot].select_experts(self._experts[slot], resident_experts)

    @staticmethod
    def _memory(plan: Plan, layout: ExpertLayout) -> Memory:
        return memory_of(plan, layout, dense_sizes(layout), 0)

    def _create_reader(self, layout: ExpertLayout) -> tuple[Reader, dict[int, int]]:
        sizes, headers = dense_sizes(layout), self._plan.headers
        reader: Reader = MappedReader(self._plan, layout, self._files)
        if conversion_of(headers, layout) is not None:
            staging = torch.empty(ConvertingReader.sizes(self._plan, layout)[1], dtype=torch.uint8)
            reader = ConvertingReader(self._plan, layout, self._files, staging)
        return PinningReader(reader, max(sizes.values()), self._load_link), sizes


class MappedReader(Reader):
    """Reads experts that are stored as the kernels read them from files in memory, their tensors together."""

    def __init__(self, plan: Plan, layout: ExpertLayout, files: Files) -> None:
        self._plan, self._layout, self._files = plan, layout, files

    def load(self, layer: int, expert: int, place: torch.Tensor) -> int:
        """Copies an expert to its place. Returns the number of bytes read."""
        tensors = self.tensors(layer, expert, place)
        parts = zip(self._plan.places[layer, expert], tensors, strict=True)
        return sum(self._files.copy(part, target.view(-1).view(torch.uint8)) for part, target in parts)

    def tensors(self, layer: int, expert: int, place: torch.Tensor) -> Expert:
        """The tensors of an expert that is in this place."""
        return dense_expert(place, self._layout, layer)


class PinningReader(Reader):
    """Reads experts to places on a device, by way of pinned memory."""

    def __init__(self, reader: Reader, size: int, load_link: DeviceLink) -> None:
        """size: bytes of the largest place. Raises ConfigError if RAM cannot pin the buffers."""
        self._reader, self._load_link = reader, load_link
        self._buffers = [(pinned_memory((size,), torch.uint8), load_link.event()) for _ in range(BUFFERS)]
        self._next = 0

    def load(self, layer: int, expert: int, place: torch.Tensor) -> int:
        """Submits the copy to the device. `DeviceLink.finish` waits for it."""
        buffer, copy_event = self._buffers[self._next]
        self._next = (self._next + 1) % BUFFERS
        # The last copy from this buffer may still be under way. Reading into it earlier would change that
        # one.
        copy_event.synchronize()
        size = self._reader.load(layer, expert, buffer)
        self._load_link.send(place, buffer[: len(place)])
        self._load_link.record(copy_event)
        return size

    def tensors(self, layer: int, expert: int, place: torch.Tensor) -> Expert:
        """The tensors of an expert that is in this place on the device."""
        return self._reader.tensors(layer, expert, place)
