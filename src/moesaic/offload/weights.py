"""Routed experts of a model larger than the fast memory: some stay there, the others come from the disk.

Streamed experts lie in one of two slots, each with room for any one layer: while one is computed from, the
other is filled, in pages that go between other transfers (MoE-Lightning, section 4.1 and appendix A.1). What
is a page table there is the kernels' table of pointers here: a page is a range of bytes, read to its place.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.stored import COMPRESSED
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.headers import STORED, WIDTHS, Headers, Place
from moesaic.offload.arrangement import Arrangement, Span, merged
from moesaic.offload.link import Link, MappedFile
from moesaic.offload.reading import DirectFile

NOT_HERE = (None, None, None)
"""In place of an expert's gate, up and down."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, COMPRESSED: torch.uint8}


@dataclass(frozen=True)
class Memory:
    """Bytes of the arena."""

    static: int
    """Experts that stay."""
    slot: int
    """One of the two: as much as the largest layer needs."""

    @property
    def total(self) -> int:
        return self.static + 2 * self.slot


class Room(Protocol):
    """Memory of the fast level; `offload.arena` has one."""

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8."""
        ...


class Streamed:
    """The routed experts of every layer, as files give them: in the type that they are computed from.

    static: layer -> the experts that stay. owned: layer -> the experts of this process, others are no part of
    it; None: all. What is owned and does not stay is streamed. `load_*` are for one thread; `experts` may be
    asked by any. A layer's turn is `count`: pass * layers of the model + layer. It has slot count % 2, so the
    next layer is loaded while this one is computed from.

    arena: what they lie in. direct: False reads through the page cache (see DirectFile). link: the slow level
    is memory of this machine, which holds the files, and this is the way from there.

    Raises CheckpointError for a tensor that is missing, damaged or of another type, and ConfigError when the
    arena has no room or `static` names what does not exist; nothing is taken from the arena then.
    """

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        arena: Room,
        direct: bool = True,
        link: Link | None = None,
        owned: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._plan = _Plan(path, layout, static, owned)
        self.memory = self._plan.memory
        self.bytes_read = 0
        """By all loads so far, whole blocks."""
        self._files = {file: _open(file, direct, link) for file in self._plan.files}
        taken = arena.take(self.memory.total)
        kept, second = self.memory.static, self.memory.total - self.memory.slot
        self._static, self._slots = taken[:kept], (taken[kept:second], taken[second:])
        dtype = DTYPES[layout.dtype]
        held = _views(self._plan.static, self._static, dtype)
        self._experts = {
            (layer, slot): _weights(self._plan, layer, ChainMap(held, _views(each, memory, dtype)))
            for layer, each in self._plan.streamed.items()
            for slot, memory in enumerate(self._slots)
        }

    @staticmethod
    def memory_for(
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        owned: Mapping[int, Sequence[int]] | None = None,
    ) -> Memory:
        """What a Streamed of these takes from its arena. Reads headers only; raises what Streamed raises."""
        return _Plan(path, layout, static, owned).memory

    @property
    def direct(self) -> bool:
        """Whether every file is read past the page cache."""
        return all(file.direct for file in self._files.values())

    def load_static(self) -> int:
        """Reads the experts that stay. Returns bytes read, as the other loads do."""
        return self._read(self._plan.static, [(0, self.memory.static)], self._static)

    def stage_page(self, layer: int, page: int, pages: int) -> int:
        """Puts a page where `load_page` takes it from. Here that is the file: there is nothing to do."""
        return 0

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        """Reads one of `pages` equal pages of a layer's streamed experts to the slot of turn `count`.

        Pages may come in any order; `experts` are whole when all have come. KeyError for a layer without
        routed experts.
        """
        if not 0 <= page < pages:
            raise ValueError(f"page {page} of {pages}")
        arranged = self._plan.streamed[layer]
        return self._read(arranged, [arranged.page(page, pages)], self._slots[count % 2])

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        """Reads these experts alone, those that stay left out, to their places in the slot of turn `count`.

        KeyError for an id that does not exist or is not owned.
        """
        spans = merged(self._spans(layer, experts))
        return self._read(self._plan.streamed[layer], spans, self._slots[count % 2])

    def experts(self, count: int, layer: int) -> ExpertWeights:
        """The experts of a layer at its turn `count`: the same object whenever layer and slot are the same.

        It names every expert that is owned, whatever was loaded: one that was not has bytes of another layer,
        so after `load_chosen` only those that were chosen, or stay, may be computed from.
        """
        return self._experts[layer, count % 2]

    def close(self) -> None:
        """Closes the files; what was loaded stays. May be called again."""
        for file in self._files.values():
            file.close()

    def _spans(self, layer: int, experts: Iterable[int]) -> list[Span]:
        """Where the streamed ones of these experts lie, sorted. They may touch."""
        arranged = self._plan.streamed[layer]
        parts = [part for expert in experts for part in self._plan.places[layer, int(expert)]]
        return sorted({arranged.span(part) for part in parts if part in arranged.at})

    def _read(
        self, arranged: Arrangement, spans: Iterable[Span], memory: torch.Tensor, first: int = 0
    ) -> int:
        """first: the byte of what is arranged that `memory` begins with."""
        into, total = memory.numpy().data, 0
        for run, (begin, end) in (piece for span in spans for piece in arranged.pieces(span)):
            offset, wanted = run.offset + begin - run.at, min(end, run.at + run.needed) - begin
            try:
                got = self._files[run.file].read(offset, into[begin - first : end - first])
            except OSError as error:
                raise CheckpointError(f"{run.file}: cannot be read ({error})") from error
            if got < wanted:
                raise CheckpointError(f"{run.file}: truncated: {got} of {wanted} bytes at {offset}")
            total += got
        self.bytes_read += total
        return total


class _Plan:
    """What lies where, before there is memory."""

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        owned: Mapping[int, Sequence[int]] | None,
    ) -> None:
        self.places = _find(path, layout, owned)
        self.num_experts = layout.num_experts
        kept = {(layer, int(expert)) for layer, experts in static.items() for expert in experts}
        unknown = sorted(kept - self.places.keys())
        if unknown:
            layer, expert = unknown[0]
            allowed = f"experts 0 to {layout.num_experts - 1} of layers {', '.join(map(str, layout.layers))}"
            raise ConfigError.field("static experts", f"expert {expert} of layer {layer}", allowed)
        self.static = Arrangement(part for key in kept for part in self.places[key])
        self.streamed = {layer: self._away(layer, kept) for layer in layout.layers}
        self.memory = Memory(self.static.size, max(each.size for each in self.streamed.values()))

    @property
    def files(self) -> set[Path]:
        return {place.file for parts in self.places.values() for place in parts}

    def _away(self, layer: int, kept: set[tuple[int, int]]) -> Arrangement:
        away = ((layer, expert) for expert in range(self.num_experts) if (layer, expert) not in kept)
        return Arrangement(part for key in away for part in self.places.get(key, ()))


def _find(
    path: Path, layout: ExpertLayout, owned: Mapping[int, Sequence[int]] | None
) -> dict[tuple[int, int], tuple[Place, ...]]:
    """(layer, expert) -> gate, up and down; of those that are owned."""
    if layout.dtype not in STORED:
        raise ConfigError.field("--dtype", layout.dtype, f"{', '.join(STORED)} where experts are streamed")
    headers, stored = Headers(path), STORED[layout.dtype]
    found = {}
    for layer in layout.layers:
        for expert in range(layout.num_experts) if owned is None else map(int, owned[layer]):
            parts = layout.tensors(layer, expert)
            found[layer, expert] = tuple(_place(headers, *part, stored=stored) for part in parts)
    return found


def _place(headers: Headers, name: str, *shape: int, stored: str) -> Place:
    """Kernels read the file's own bytes: of the right type, and at a multiple of a number's size."""
    place = headers.find(name, *shape)
    if place.dtype != stored:
        allowed = f"{stored}: streamed experts are computed from as they are stored"
        raise CheckpointError(f"{place.file}: tensor {name}: got {place.dtype}; allowed: {allowed}")
    if place.offset % WIDTHS[stored]:
        allowed = f"a multiple of {WIDTHS[stored]} (safetensors writes such files)"
        raise CheckpointError(f"{place.file}: tensor {name} at byte {place.offset}; allowed: {allowed}")
    return place


def _open(file: Path, direct: bool, link: Link | None) -> DirectFile | MappedFile:
    try:
        return DirectFile(file, direct) if link is None else MappedFile(file, link)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error


def _views(arranged: Arrangement, memory: torch.Tensor, dtype: torch.dtype) -> dict[Place, torch.Tensor]:
    """Each tensor in its place."""
    return {
        place: memory[at : at + place.size].view(dtype).view(place.shape) for place, at in arranged.at.items()
    }


def _weights(plan: _Plan, layer: int, views: Mapping[Place, torch.Tensor]) -> ExpertWeights:
    places = (plan.places.get((layer, expert), NOT_HERE) for expert in range(plan.num_experts))
    parts = [[None if part is None else views[part] for part in each] for each in places]
    return ExpertWeights(*map(tuple, zip(*parts, strict=True)))
