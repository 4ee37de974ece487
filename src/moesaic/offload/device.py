"""A fast level that is a CUDA device's memory, over RAM. Nothing here has run on a GPU yet.

The tests use a stand-in for a GPU. Each lane's thread submits work to a CUDA stream of its own, so copies run
beside computation. A task ends when the device has done its work (`DeviceLink.finish`), so dependencies
between lanes work as they do if all levels are memory of one machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.offload.arrangement import Span, merge_spans
from moesaic.offload.link import Link
from moesaic.offload.reading import ALIGNMENT
from moesaic.offload.weights import StreamedExperts

PIECE = 64 << 20
"""Bytes of pinned memory through which static experts are copied if no layer is streamed."""


class DeviceMemory:
    """Memory of the device. `offload.arena.Arena` is the same for this process's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, size: int) -> torch.Tensor:
        """Returns [size] uint8, uninitialized."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class DeviceLink(Link):
    """The link between a device's memory and RAM in one direction, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._computes = torch.cuda.current_stream(device)
        """The stream of the thread that creates the link, which is the fast processor's thread."""

    def copy_to_device(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a copy in the device's memory."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        pinned_source = (
            source if source.is_pinned() else pinned_memory(source.shape, source.dtype).copy_(source)
        )
        self.send(target, pinned_source)
        return target

    def copy_to_host(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a copy in pinned memory. The copy is complete when this returns."""
        target = pinned_memory(source.shape, source.dtype)
        target.copy_(source, non_blocking=True)
        self.finish()
        self.copied_bytes += target.nbytes
        return target

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a dense copy on the other side: on the device for CPU tensors, in RAM for others."""
        return self.copy_to_device(source) if source.device.type == "cpu" else self.copy_to_host(source)

    def gather(self, target: torch.Tensor, source: torch.Tensor, indices: torch.Tensor) -> None:
        """Copies source[chosen] [c, ...] from RAM to target [c, ...] on the device."""
        pinned_rows = pinned_memory(target.shape, target.dtype)
        self.send(target, torch.index_select(source, 0, indices, out=pinned_rows))

    def send(self, target: torch.Tensor, pinned_source: torch.Tensor) -> None:
        """Submits a copy to the device; `finish` waits for it."""
        target.copy_(pinned_source, non_blocking=True)
        target.record_stream(self._computes)  # the memory is not reused before the fast processor has read it
        self.copied_bytes += target.nbytes

    def finish(self) -> None:
        """Waits until the device has done this thread's work. It sleeps, since other work needs the cores."""
        event = self.event()
        self.record(event)
        event.synchronize()

    def event(self) -> torch.cuda.Event:
        """An event. Its `synchronize` sleeps until what was submitted before `record` is done."""
        made: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return made

    def record(self, event: torch.cuda.Event) -> None:
        """Let the event stand for all that this thread has submitted so far."""
        event.record(torch.cuda.current_stream(self._device))


class StagedExperts(StreamedExperts):
    """Routed experts on a device, over files in RAM.

    Pages are copied through pinned memory with room for one layer (MoE-Lightning, appendix A.1). `stage_page`
    copies a page to pinned memory, and `load_page` copies it from there to the device.

    Raises the same errors as Streamed.
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
        super().__init__(path, layout, static, memory, link=Link(), owned_experts=owned_experts)
        self._load_link = load_link
        self._pinned_buffer = pinned_memory(
            (self.memory.slot or min(self.memory.static, PIECE),), torch.uint8
        )

    def load_static(self) -> int:
        # The pinned buffer is smaller than all static experts: RAM may not be able to pin that much.
        size, total = len(self._pinned_buffer), self.memory.static
        for begin in range(0, total, size or 1):
            end = min(begin + size, total)
            self._read(self._plan.static_arrangement, [(begin, end)], self._pinned_buffer, begin)
            self._load_link.send(self._static[begin:end], self._pinned_buffer[: end - begin])
            self._load_link.finish()
        return total

    def stage_page(self, layer: int, page: int, pages: int) -> int:
        return self._read(
            self._plan.streamed_arrangements[layer], [self._page(layer, page, pages)], self._pinned_buffer
        )

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        return self._send(count, [self._page(layer, page, pages)])

    def _page(self, layer: int, page: int, pages: int) -> Span:
        """Returns the bytes of a page, which are the same bytes of pinned memory in every layer.

        So a page can be staged when the same page of the layer before has been loaded, even though other
        pages of that layer have not. A smaller layer has smaller last pages.
        """
        blocks, size = self.memory.slot // ALIGNMENT, self._plan.streamed_arrangements[layer].size
        begin, end = (min(place * blocks // pages * ALIGNMENT, size) for place in (page, page + 1))
        return begin, end

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        """Copies one range to the device while it reads the next one into pinned memory."""
        loaded_bytes, arrangement = 0, self._plan.streamed_arrangements[layer]
        for span in merge_spans(self._spans(layer, experts)):
            self._read(arrangement, [span], self._pinned_buffer)
            loaded_bytes += self._send(count, [span])
        return loaded_bytes

    def _send(self, count: int, spans: Iterable[Span]) -> int:
        slot, total = self._slots[count % 2], 0
        for begin, end in spans:
            self._load_link.send(slot[begin:end], self._pinned_buffer[begin:end])
            total += end - begin
        return total


def stream_of(device: torch.device) -> AbstractContextManager[object]:
    """A context in which the calling thread submits work to a CUDA stream of its own."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    context: AbstractContextManager[object] = torch.cuda.stream(stream)
    return context


def pinned_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns uninitialized pinned memory. Raises ConfigError if RAM cannot pin that much."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size, reason = math.prod(shape) * dtype.itemsize, str(error).partition("\n")[0]
        raise ConfigError.field("pinned memory", size, f"what RAM has free ({reason})") from error
