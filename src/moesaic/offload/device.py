"""A fast level that is a CUDA device's memory, over RAM. Nothing here has run on a GPU yet.

Its tests put a stand-in for a GPU in its place. Each lane's thread tells the device what to do on a stream of
its own, so copies go beside products; a task has ended when the device has done it (`DeviceLink.finish`), so
what lanes know of each other is the same as where all levels are memory of one machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.offload.arrangement import Span, merged
from moesaic.offload.link import Link
from moesaic.offload.reading import ALIGNMENT
from moesaic.offload.weights import Streamed

PIECE = 64 << 20
"""Bytes of pinned memory that the experts that stay go through, where no layer is streamed."""


class DeviceMemory:
    """Memory of the device, as `offload.arena.Arena` is of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8, whatever is in it."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class DeviceLink(Link):
    """One direction between a device's memory and RAM, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._computes = torch.cuda.current_stream(device)
        """The stream of the thread that makes the link: the fast processor's."""

    def down(self, source: torch.Tensor) -> torch.Tensor:
        """The same numbers in memory of the device."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        held = source if source.is_pinned() else _pinned(source.shape, source.dtype).copy_(source)
        self.send(target, held)
        return target

    def up(self, source: torch.Tensor) -> torch.Tensor:
        """The same numbers in pinned memory; they are there when this returns."""
        target = _pinned(source.shape, source.dtype)
        target.copy_(source, non_blocking=True)
        self.finish()
        self.moved += target.nbytes
        return target

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """To the other side of where it is, dense."""
        return self.down(source) if source.device.type == "cpu" else self.up(source)

    def gather(self, target: torch.Tensor, source: torch.Tensor, chosen: torch.Tensor) -> None:
        """Copies source[chosen] [c, ...], in RAM, to target [c, ...] on the device."""
        held = _pinned(target.shape, target.dtype)
        self.send(target, torch.index_select(source, 0, chosen, out=held))

    def send(self, target: torch.Tensor, pinned: torch.Tensor) -> None:
        """Tells the device to copy; `finish` waits for it."""
        target.copy_(pinned, non_blocking=True)
        target.record_stream(self._computes)  # not given to others before what computes has read it
        self.moved += target.nbytes

    def finish(self) -> None:
        """Until the device has done all that this thread told it, without spinning: cores have work."""
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        done.synchronize()


class Staged(Streamed):
    """Routed experts on a device, over files in RAM: pages go through pinned memory, which has room for one
    layer (MoE-Lightning, appendix A.1). `load_page` brings what `stage_page` put there.

    Raises what Streamed raises.
    """

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        memory: DeviceMemory,
        down: DeviceLink,
        owned: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(path, layout, static, memory, link=Link(), owned=owned)
        self._down = down
        self._pinned = _pinned((self.memory.slot or min(self.memory.static, PIECE),), torch.uint8)

    def load_static(self) -> int:
        size, total = len(self._pinned), self.memory.static
        for begin in range(0, total, size or 1):
            end = min(begin + size, total)
            self._read(self._plan.static, [(begin, end)], self._pinned, begin)
            self._down.send(self._static[begin:end], self._pinned[: end - begin])
            self._down.finish()
        return total

    def stage_page(self, layer: int, page: int, pages: int) -> int:
        return self._read(self._plan.streamed[layer], [self._page(layer, page, pages)], self._pinned)

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        return self._send(count, [self._page(layer, page, pages)])

    def _page(self, layer: int, page: int, pages: int) -> Span:
        """The same bytes of pinned memory in every layer, as long as it has them: a page may be staged once
        that one of the layer before has come down, though not all of that layer has."""
        blocks, size = self.memory.slot // ALIGNMENT, self._plan.streamed[layer].size
        begin, end = (min(place * blocks // pages * ALIGNMENT, size) for place in (page, page + 1))
        return begin, end

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        """One range goes down while the next one is put into pinned memory."""
        loaded, arranged = 0, self._plan.streamed[layer]
        for span in merged(self._spans(layer, experts)):
            self._read(arranged, [span], self._pinned)
            loaded += self._send(count, [span])
        return loaded

    def _send(self, count: int, spans: Iterable[Span]) -> int:
        slot, total = self._slots[count % 2], 0
        for begin, end in spans:
            self._down.send(slot[begin:end], self._pinned[begin:end])
            total += end - begin
        return total


def stream_of(device: torch.device) -> AbstractContextManager[object]:
    """Within it what the calling thread tells the device is a stream of its own."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    made: AbstractContextManager[object] = torch.cuda.stream(stream)
    return made


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Raises ConfigError where RAM has no more to pin."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size, said = math.prod(shape) * dtype.itemsize, str(error).partition("\n")[0]
        raise ConfigError.field("pinned memory", size, f"what RAM has free ({said})") from error
