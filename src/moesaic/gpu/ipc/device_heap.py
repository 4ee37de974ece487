"""Places in memory of the own GPU that other processes open: the heap of calls whose rows stay on devices.

This room knows no GPU: `gpu.ipc.device_sharing` makes the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.core.errors import ConfigError

LOG = logging.getLogger(__name__)
ALIGNMENT = 256
"""Places begin at multiples of so many bytes, as a GPU's allocations do."""


class SharedMemory(Protocol):
    """Memory of a GPU that several processes share."""

    @property
    def name(self) -> bytes:
        """What another process opens it by."""
        ...

    @property
    def tensor(self) -> Any:
        """[size] bytes, of a type that this room does not know. Slices are views of the same memory."""
        ...

    def close(self) -> None:
        """Free it, or give it back to its owner."""
        ...


def try_close(memory: SharedMemory) -> bool:
    """Close memory of another process, which may have died. Returns whether the own GPU could do it."""
    try:
        memory.close()
    except ConfigError as error:
        LOG.warning("memory of another process stays open: %s", error)
        return False
    return True


@dataclass(frozen=True, eq=False)
class Place:
    """A part of exported memory."""

    memory: SharedMemory
    begin: int
    size: int
    room: int
    """Bytes up to the next place."""

    @property
    def tensor(self) -> Any:
        """[size] bytes."""
        return self.memory.tensor[self.begin : self.begin + self.size]


class DeviceHeap:
    """Memory that grows when there is no room. Used by one thread.

    What is given back may still be read by work that the own GPU has not done yet. Nothing else orders that
    work and a later write of another GPU. So a place is used again only after `reclaim_places`.
    """

    def __init__(self, export: Callable[[int], SharedMemory]) -> None:
        """export: allocates at least so many bytes."""
        self._export = export
        self._free: list[tuple[SharedMemory, list[tuple[int, int]]]] = []
        """Memory, and the begin and size of each of its free parts, ascending."""
        self._returned_places: list[Place] = []
        self.is_closed = False

    @property
    def size(self) -> int:
        """Bytes allocated."""
        return sum(len(memory.tensor) for memory, _ in self._free)

    def take(self, size: int) -> Place:
        """A place of `size` bytes. Raises ConfigError if the GPU has no room for it."""
        room = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        for memory, parts in self._free:
            for index, (begin, free) in enumerate(parts):
                if free >= room:
                    parts[index : index + 1] = [(begin + room, free - room)] if free > room else []
                    return Place(memory, begin, size, room)
        memory = self._export(room)
        self._free.append((memory, [(0, len(memory.tensor))]))
        return self.take(size)

    def give_back(self, place: Place) -> None:
        """The own GPU was told everything that it does with this place."""
        self._returned_places.append(place)

    def reclaim_places(self) -> None:
        """The host waited until the own GPU had done what it was told before."""
        returned_places, self._returned_places = self._returned_places, []
        for place in returned_places:
            parts = next(parts for memory, parts in self._free if memory is place.memory)
            parts.append((place.begin, place.room))
            parts.sort()
            merged_parts = [parts[0]]
            for begin, room in parts[1:]:
                last, size = merged_parts[-1]
                if last + size == begin:
                    merged_parts[-1] = last, size + room
                else:
                    merged_parts.append((begin, room))
            parts[:] = merged_parts

    def close(self) -> None:
        """Free everything. No other process may have it open."""
        self.is_closed = True
        for memory, _ in self._free:
            memory.close()
        self._free.clear()
        self._returned_places.clear()
