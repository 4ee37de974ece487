"""Routed experts of a model larger than the fast memory: some stay there, the others come from the disk.

There are two slots for streamed experts, each with room for any one layer. While one slot is computed from,
the other is filled in pages, which run between other transfers (MoE-Lightning, section 4.1 and appendix A.1).
The kernels' table of pointers replaces the paper's page table: a page is a range of bytes that is read
directly to its final place.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.experts import PARTS, ExpertLayout
from moesaic.core.weight_types import COMPRESSED_DTYPE, NUMBER_BYTES, PACKED_DTYPES, is_packed, split_dtype
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.checkpoint import DTYPES as FILE_DTYPES
from moesaic.models.conversion import conversion_of
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.headers import COMPRESSED_ROWS, STORED, WIDTHS, Headers, Place
from moesaic.offload.arrangement import Arrangement, Run, Span, merge_spans
from moesaic.offload.link import Link, MappedFile
from moesaic.offload.reading import PIECE, DirectFile, ParallelReads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, **dict.fromkeys(PACKED_DTYPES, torch.uint8)}


@dataclass(frozen=True)
class Memory:
    """How many bytes of the arena the experts use."""

    static: int
    """Bytes of the experts that stay on the fast level."""
    slot: int
    """Bytes of one of the two slots: enough for the largest layer."""
    staging: int = 0
    """Bytes of memory that experts pass through."""

    @property
    def total(self) -> int:
        return self.static + 2 * self.slot + self.staging


class Room(Protocol):
    """Memory of the fast level; `offload.arena.Arena` is one."""

    def take(self, size: int) -> torch.Tensor:
        """Returns [size] uint8."""
        ...


class StreamedExperts:
    """The routed experts of every layer, in the data type of the files, which the kernels compute from.

    static: layer -> the experts that stay on the fast level. owned_experts: layer -> the experts of this
    process; None means all. Owned experts that are not static are streamed. One thread may call `load_*`; any
    thread may call `experts`. A layer's turn `count` is pass * layers of the model + layer. The layer uses
    slot count % 2, so the next layer is loaded while this one is computed from.

    arena: memory for the experts. direct: False reads through the page cache (see DirectFile). link: set if
    the slow level is this machine's memory; the files are then in memory and copied over this link.

    Raises CheckpointError for a tensor that is missing, damaged or of another type. Raises ConfigError if the
    arena is too small or `static` names an expert that does not exist. After an error nothing is taken from
    the arena.
    """

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        arena: Room,
        direct: bool = True,
        link: Link | None = None,
        owned_experts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._plan = Plan(path, layout, static, owned_experts)
        self.memory = self._memory(self._plan, layout)
        self._files = Files(self._plan.files, direct, link)
        memory, slot = arena.take(self.memory.total), self.memory.slot
        self._static, slots = memory[: self.memory.static], memory[self.memory.static :]
        self._slots, self._staging = (slots[:slot], slots[slot : 2 * slot]), slots[2 * slot :]
        self._experts = self._lay_out(layout)

    @classmethod
    def memory_for(
        cls,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        owned_experts: Mapping[int, Sequence[int]] | None = None,
    ) -> Memory:
        """Returns the memory that a Streamed with these arguments takes from its arena.

        Reads only headers. Raises the same errors as Streamed.
        """
        return cls._memory(Plan(path, layout, static, owned_experts), layout)

    @property
    def direct(self) -> bool:
        """Whether reads of every file bypass the page cache."""
        return self._files.direct

    @property
    def bytes_read(self) -> int:
        """Bytes read by all loads so far, in whole blocks."""
        return self._files.bytes_read

    def load_static(self) -> int:
        """Reads the experts that stay. Returns the number of bytes read, as the other loads do."""
        return self._read(self._plan.static_arrangement, [(0, self.memory.static)], self._static)

    def stage_page(self, layer: int, page: int, pages: int) -> int:
        """Copies a page to where `load_page` takes it from. Here that is the file, so nothing is done."""
        return 0

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        """Reads one of `pages` equal pages of a layer's streamed experts into the slot of turn `count`.

        Pages may be loaded in any order; `experts` is complete when all are loaded. Raises KeyError for a
        layer without routed experts.
        """
        if not 0 <= page < pages:
            raise ValueError(f"page {page} of {pages}")
        arrangement = self._plan.streamed_arrangements[layer]
        return self._read(arrangement, [arrangement.page(page, pages)], self._slots[count % 2])

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        """Reads only these experts, except static ones, into their places in the slot of turn `count`.

        Raises KeyError for an id that does not exist or is not owned.
        """
        spans = merge_spans(self._spans(layer, experts))
        return self._read(self._plan.streamed_arrangements[layer], spans, self._slots[count % 2])

    def experts(self, count: int, layer: int) -> ExpertWeights:
        """The experts of a layer at its turn `count`. The object is the same for the same layer and slot.

        It contains every owned expert, even if it was not loaded. An expert that was not loaded has bytes of
        another layer. So after `load_chosen` only the chosen and the static experts may be computed from.
        """
        return self._experts[layer, count % 2]

    def close(self) -> None:
        """Closes the files; loaded experts stay. May be called more than once."""
        self._files.close()

    @staticmethod
    def _memory(plan: Plan, layout: ExpertLayout) -> Memory:
        return Memory(
            plan.static_arrangement.size,
            max(arrangement.size for arrangement in plan.streamed_arrangements.values()),
        )

    def _lay_out(self, layout: ExpertLayout) -> dict[tuple[int, int], ExpertWeights]:
        """Returns (layer, slot) -> the layer's experts, in the memory of this object."""
        static_views = views(self._plan.static_arrangement, self._static)
        return {
            (layer, slot): _weights(
                self._plan, layout, layer, ChainMap(static_views, views(arrangement, memory))
            )
            for layer, arrangement in self._plan.streamed_arrangements.items()
            for slot, memory in enumerate(self._slots)
        }

    def _spans(self, layer: int, experts: Iterable[int]) -> list[Span]:
        """Returns the sorted spans of the streamed experts among these. Spans may touch."""
        arrangement = self._plan.streamed_arrangements[layer]
        parts = [part for expert in experts for part in self._plan.places[layer, int(expert)]]
        return sorted({arrangement.span(part) for part in parts if part in arrangement.memory_offsets})

    def _read(
        self, arrangement: Arrangement, spans: Iterable[Span], memory: torch.Tensor, first: int = 0
    ) -> int:
        """Reads spans of arranged bytes to `memory`. Returns the number of bytes read."""
        return self._files.read(arrangement, spans, memory, first)


class Files:
    """Open files of a checkpoint, from which experts are read. Several threads may read at once.

    direct, link: as in Streamed. Raises CheckpointError for a file that cannot be opened.
    """

    def __init__(self, files: Iterable[Path], direct: bool = True, link: Link | None = None) -> None:
        self.bytes_read = 0
        """Bytes read so far, in whole blocks."""
        self._files = {file: _open(file, direct, link) for file in files}
        self._parallel = ParallelReads() if link is None else None

    @property
    def direct(self) -> bool:
        """Whether reads of every file bypass the page cache."""
        return all(file.direct for file in self._files.values())

    def read(
        self, arrangement: Arrangement, spans: Iterable[Span], memory: torch.Tensor, first: int = 0
    ) -> int:
        """Reads spans of the arranged bytes. Returns the number of bytes read.

        first: which of these bytes is the first of `memory`. Raises CheckpointError for a file that cannot be
        read or ends too early.
        """
        return self.run(self.list_reads(arrangement, spans, memory, first))

    def list_reads(
        self, arrangement: Arrangement, spans: Iterable[Span], memory: torch.Tensor, first: int = 0
    ) -> list[Callable[[], int]]:
        """The reads that `read` makes with these arguments."""
        target = memory.numpy().data
        return [
            partial(self._read_piece, run, begin, target[begin - first : end - first])
            for span in spans
            for run, run_span in arrangement.pieces(span)
            for begin, end in _cut(run_span)
        ]

    def run(self, reads: Sequence[Callable[[], int]]) -> int:
        """Makes reads of `list_reads`, several at once from a disk. Returns the number of bytes read."""
        total = sum(read() for read in reads) if self._parallel is None else self._parallel.run(reads)
        self.bytes_read += total
        return total

    def _read_piece(self, run: Run, begin: int, target: memoryview) -> int:
        offset = run.offset + begin - run.memory_offset
        required_bytes = min(begin + len(target), run.memory_offset + run.required_bytes) - begin
        try:
            got = self._files[run.file].read(offset, target)
        except OSError as error:
            raise CheckpointError(f"{run.file}: cannot be read ({error})") from error
        if got < required_bytes:
            raise CheckpointError(f"{run.file}: truncated: {got} of {required_bytes} bytes at {offset}")
        return got

    def copy(self, place: Place, target: torch.Tensor) -> int:
        """Copies one tensor of a file that is in memory to `target`, [bytes] uint8. Returns its bytes."""
        got = self._files[place.file].read(place.offset, target.numpy().data)
        if got < place.size:
            raise CheckpointError(f"{place.file}: truncated: {got} of {place.size} bytes at {place.offset}")
        self.bytes_read += got
        return got

    def close(self) -> None:
        """Closes the files. May be called more than once."""
        if self._parallel is not None:
            self._parallel.close()
        for file in self._files.values():
            file.close()


class Plan:
    """The memory layout of all experts, computed before memory is allocated."""

    def __init__(
        self,
        path: Path,
        layout: ExpertLayout,
        static: Mapping[int, Sequence[int]],
        owned_experts: Mapping[int, Sequence[int]] | None,
    ) -> None:
        self.headers = Headers(path)
        self.places = _find(self.headers, layout, owned_experts)
        """(layer, expert) -> what the files have of an owned expert."""
        self.num_experts = layout.num_experts
        self.static_keys = {(layer, int(expert)) for layer, experts in static.items() for expert in experts}
        """(layer, expert) of the experts that stay on the fast level."""
        # Checked before any memory is taken, so that an error leaves the arena as it was.
        unknown_keys = sorted(self.static_keys - self.places.keys())
        if unknown_keys:
            layer, expert = unknown_keys[0]
            allowed_experts = (
                f"experts 0 to {layout.num_experts - 1} of layers {', '.join(map(str, layout.layers))}"
            )
            raise ConfigError.field("static experts", f"expert {expert} of layer {layer}", allowed_experts)
        self.static_arrangement = Arrangement(part for key in self.static_keys for part in self.places[key])
        self.streamed_arrangements = {
            layer: Arrangement(
                part for expert in self.list_streamed(layer) for part in self.places[layer, expert]
            )
            for layer in layout.layers
        }

    @property
    def files(self) -> set[Path]:
        return {place.file for parts in self.places.values() for place in parts}

    def list_streamed(self, layer: int) -> list[int]:
        """The owned experts of a layer that are streamed, ascending."""
        owned_experts = (expert for expert in range(self.num_experts) if (layer, expert) in self.places)
        return [expert for expert in owned_experts if (layer, expert) not in self.static_keys]


def _find(
    headers: Headers, layout: ExpertLayout, owned_experts: Mapping[int, Sequence[int]] | None
) -> dict[tuple[int, int], tuple[Place, ...]]:
    """Returns (layer, expert) -> the places of its tensors, for the owned experts."""
    places, converts = {}, conversion_of(headers, layout) is not None
    for layer in layout.layers:
        dtype = layout.dtype_of(layer)
        if not set(split_dtype(dtype)) <= DTYPES.keys():
            raise ConfigError.field("--dtype", dtype, f"{', '.join(STORED)} where experts are streamed")
        types = [*(dtype_of_part(part, dtype) for part in range(3)), dtype, dtype, dtype]
        for expert in range(layout.num_experts) if owned_experts is None else map(int, owned_experts[layer]):
            parts = zip(layout.tensors(layer, expert), types, strict=False)
            places[layer, expert] = tuple(
                place
                for part, stored in parts
                for place in _places(headers, *part, kernel_dtype=stored, converts=converts)
            )
    return places


def dtype_of_part(part: int, dtype: str) -> str:
    """The type of gate, up or down (0, 1, 2) of experts of type `dtype`."""
    return split_dtype(dtype)[part == 2]


def _places(headers: Headers, name: str, *shape: int, kernel_dtype: str, converts: bool) -> list[Place]:
    """Finds the tensors of a matrix or of a vector. kernel_dtype: the type of a matrix that the kernels read.

    converts: whether experts are converted when they are loaded. Then compressed ones are decompressed.
    """
    matrix = headers.find_quantized(name, *shape)
    if matrix is None:
        return (
            [headers.find(name, *shape)]
            if len(shape) == 1
            else [_place(headers, name, *shape, kernel_dtype=kernel_dtype, converts=converts)]
        )
    allowed_types = (matrix.dtype, matrix.conversion, *NUMBER_BYTES) if converts else (matrix.dtype,)
    if len(shape) == 2 and kernel_dtype not in allowed_types:
        problem = f"an expert is stored as {matrix.dtype}; allowed: {kernel_dtype}, as others"
        raise CheckpointError(f"{headers.path}: tensor {matrix.name}: {problem}")
    return [headers.locate_part(part)[0] for part in matrix.parts]


def _place(headers: Headers, name: str, *shape: int, kernel_dtype: str, converts: bool) -> Place:
    """Finds a matrix. Kernels read the file's bytes as they are, so type and alignment must be right."""
    place = headers.find(name, *shape)
    if converts and place.dtype == COMPRESSED_ROWS and kernel_dtype in NUMBER_BYTES:
        return place
    if place.dtype != STORED.get(kernel_dtype):
        kind = STORED.get(kernel_dtype, f"{kernel_dtype}, as others")
        allowed_types = f"{kind}: streamed experts are computed from as they are stored"
        raise CheckpointError(f"{place.file}: tensor {name}: got {place.dtype}; allowed: {allowed_types}")
    width = WIDTHS[place.dtype]
    # Blocks are read to memory as they are in the file, so a number's alignment there is the file's.
    if place.offset % width:
        allowed_types = f"a multiple of {width} (safetensors writes such files)"
        raise CheckpointError(f"{place.file}: tensor {name} at byte {place.offset}; allowed: {allowed_types}")
    return place


def _cut(span: Span) -> Iterator[Span]:
    """Pieces of a span, as a disk reads them at once."""
    begin, end = span
    for start in range(begin, end, PIECE):
        yield start, min(start + PIECE, end)


def _open(file: Path, direct: bool, link: Link | None) -> DirectFile | MappedFile:
    try:
        return DirectFile(file, direct) if link is None else MappedFile(file, link)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error


def views(arrangement: Arrangement, memory: torch.Tensor) -> dict[Place, torch.Tensor]:
    """Returns a view of each tensor in `memory`. Rows of blocks are bytes."""
    return {
        place: _view(place, memory[offset : offset + place.size])
        for place, offset in arrangement.memory_offsets.items()
    }


def _view(place: Place, data: torch.Tensor) -> torch.Tensor:
    if place.dtype in BLOCKS:
        return data.view(*place.shape[:-1], -1)
    return data.view(FILE_DTYPES[place.dtype]).view(place.shape)


def _weights(
    plan: Plan, layout: ExpertLayout, layer: int, views: Mapping[Place, torch.Tensor]
) -> ExpertWeights:
    tensors = {
        expert: [views[place] for place in plan.places[layer, expert]]
        for expert in range(plan.num_experts)
        if (layer, expert) in plan.places
    }
    return weights_of(layout, layer, tensors)


def weights_of(
    layout: ExpertLayout, layer: int, tensors: Mapping[int, Sequence[torch.Tensor]]
) -> ExpertWeights:
    """The experts of a layer that have these tensors. tensors: expert -> its tensors."""
    dtype = layout.dtype_of(layer)
    packed_dtype = dtype if is_packed(dtype) else COMPRESSED_DTYPE
    return ExpertWeights.from_resident(
        layout.num_experts, tensors, PARTS[layout.form], layout.activation, packed_dtype
    )
