"""Places parts of files in memory such that whole blocks can be read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moesaic.models.headers import Place
from moesaic.offload.reading import ALIGNMENT

Span = tuple[int, int]
"""Begin and end in bytes, both multiples of ALIGNMENT."""


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one file that are also consecutive in memory."""

    file: Path
    offset: int
    """Byte offset of the first block in the file."""
    memory_offset: int
    """Byte offset of the first block in memory."""
    size: int
    """Size in bytes, a multiple of the block size."""
    required_bytes: int
    """Bytes up to the end of the last tensor. The file may end there, before the block does."""


class Arrangement:
    """Memory layout of tensors, block by block as in their files. Blocks without tensors are left out.

    A direct read transfers whole blocks, so each tensor keeps its offset within its block.

    >>> file = Path("a")
    >>> places = [Place(file, 5000, 3000, "F32", ()), Place(file, 100, 4000, "F32", ())]
    >>> found = Arrangement([*places, Place(file, 20480, 10, "F32", ())])
    >>> [(run.offset, run.memory_offset, run.size) for run in found.runs], found.size
    ([(0, 0, 8192), (20480, 8192, 4096)], 12288)
    >>> found.memory_offsets[places[0]], found.span(places[0])
    (5000, (4096, 8192))
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.runs: list[Run] = []
        self.memory_offsets: dict[Place, int] = {}
        """Tensor -> byte offset of its first byte in memory."""
        for place in sorted(places, key=lambda place: (place.file, place.offset)):
            self._add(place)
        self._starts = [run.memory_offset for run in self.runs]

    @property
    def size(self) -> int:
        """Bytes of memory, a multiple of the block size."""
        return self.runs[-1].memory_offset + self.runs[-1].size if self.runs else 0

    def span(self, place: Place) -> Span:
        """The blocks of memory that contain a part of one tensor."""
        offset = self.memory_offsets[place]
        return _round_down(offset), _round_up(offset + place.size)

    def page(self, page: int, pages: int) -> Span:
        """The blocks of page number `page` of `pages`. Page sizes differ by at most one block."""
        blocks = self.size // ALIGNMENT
        return page * blocks // pages * ALIGNMENT, (page + 1) * blocks // pages * ALIGNMENT

    def pieces(self, span: Span) -> Iterator[tuple[Run, Span]]:
        """Splits `span` into parts that are contiguous in one file, each with the run that contains it."""
        offset, end = span
        first = max(bisect_right(self._starts, offset) - 1, 0)
        for run in self.runs[first:]:
            if offset >= end:
                return
            stop = min(end, run.memory_offset + run.size)
            yield run, (offset, stop)
            offset = stop

    def _add(self, place: Place) -> None:
        """Adds a tensor whose offset is not below those of its file that were added before."""
        begin, end = _round_down(place.offset), _round_up(place.offset + place.size)
        run = self.runs[-1] if self.runs else None
        if run is None or run.file != place.file or begin > run.offset + run.size:
            run = Run(place.file, begin, self.size, 0, 0)
            self.runs.append(run)
        run.size = max(run.size, end - run.offset)
        run.required_bytes = max(run.required_bytes, place.offset + place.size - run.offset)
        self.memory_offsets[place] = run.memory_offset + place.offset - run.offset


def merge_spans(spans: Iterable[Span]) -> Iterator[Span]:
    """Joins sorted spans that touch or overlap."""
    begin = end = 0
    for first, last in spans:
        if first > end:
            if end > begin:
                yield begin, end
            begin = first
        end = max(end, last)
    if end > begin:
        yield begin, end


def _round_down(number: int) -> int:
    return number // ALIGNMENT * ALIGNMENT


def _round_up(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
