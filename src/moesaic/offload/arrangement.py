"""Where parts of files stand in memory when they are read in whole blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moesaic.models.headers import Place
from moesaic.offload.reading import ALIGNMENT

Span = tuple[int, int]
"""Begin and end, multiples of ALIGNMENT."""


@dataclass(slots=True)
class Run:
    """Neighbouring blocks of one file that stay neighbours in memory."""

    file: Path
    offset: int
    """Of the first block in the file."""
    at: int
    """Of the first block in memory."""
    size: int
    """Bytes, whole blocks."""
    needed: int
    """Bytes up to the end of the last tensor: the file may end there."""


class Arrangement:
    """Tensors in memory as in their files, block by block: each block once, and none without a part of them.

    A direct read brings whole blocks, so each tensor keeps its place within its block.

    >>> file = Path("a")
    >>> places = [Place(file, 5000, 3000, "F32", ()), Place(file, 100, 4000, "F32", ())]
    >>> found = Arrangement([*places, Place(file, 20480, 10, "F32", ())])
    >>> [(run.offset, run.at, run.size) for run in found.runs], found.size
    ([(0, 0, 8192), (20480, 8192, 4096)], 12288)
    >>> found.at[places[0]], found.span(places[0])
    (5000, (4096, 8192))
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.runs: list[Run] = []
        self.at: dict[Place, int] = {}
        """Of each tensor's first byte in memory."""
        for place in sorted(places, key=lambda place: (place.file, place.offset)):
            self._add(place)
        self._starts = [run.at for run in self.runs]

    @property
    def size(self) -> int:
        """Bytes of memory, whole blocks."""
        return self.runs[-1].at + self.runs[-1].size if self.runs else 0

    def span(self, place: Place) -> Span:
        """The blocks of memory that one tensor touches."""
        at = self.at[place]
        return _down(at), _up(at + place.size)

    def page(self, page: int, pages: int) -> Span:
        """The blocks of one of `pages` pages, which are equal but for a block."""
        blocks = self.size // ALIGNMENT
        return page * blocks // pages * ALIGNMENT, (page + 1) * blocks // pages * ALIGNMENT

    def pieces(self, span: Span) -> Iterator[tuple[Run, Span]]:
        """The parts of `span` that are neighbours in a file too."""
        at, end = span
        first = max(bisect_right(self._starts, at) - 1, 0)
        for run in self.runs[first:]:
            if at >= end:
                return
            stop = min(end, run.at + run.size)
            yield run, (at, stop)
            at = stop

    def _add(self, place: Place) -> None:
        """`place` lies behind all earlier ones of its file."""
        begin, end = _down(place.offset), _up(place.offset + place.size)
        run = self.runs[-1] if self.runs else None
        if run is None or run.file != place.file or begin > run.offset + run.size:
            run = Run(place.file, begin, self.size, 0, 0)
            self.runs.append(run)
        run.size = max(run.size, end - run.offset)
        run.needed = max(run.needed, place.offset + place.size - run.offset)
        self.at[place] = run.at + place.offset - run.offset


def merged(spans: Iterable[Span]) -> Iterator[Span]:
    """Sorted spans, those that touch or overlap as one."""
    begin = end = 0
    for first, last in spans:
        if first > end:
            if end > begin:
                yield begin, end
            begin = first
        end = max(end, last)
    if end > begin:
        yield begin, end


def _down(number: int) -> int:
    return number // ALIGNMENT * ALIGNMENT


def _up(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
