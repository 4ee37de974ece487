"""The weights of an expert server, read from the checkpoint with numpy alone.

A matrix that the checkpoint stores in the type that the kernels read stays in the mapped file. So processes
of one host share its pages, and loading an expert only needs the header of the file. Other types are
converted once. Without mapping, experts are read into memory of the server's own. So are experts in columns,
which the kernels read as rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import BIASED_ROWS, COLUMNS, DOWN_COLUMNS, PARTS, ROWS, ExpertLayout
from moesaic.core.stored import of_matrices
from moesaic.kernels.compressed_layout import decompress
from moesaic.models.columns import as_rows, bias_rows, transpose_bytes
from moesaic.models.headers import COMPRESSED_ROWS, NUMBERS, STORED, WIDTHS, Headers, Place
from moesaic.models.headers import INDEX as INDEX
from moesaic.models.headers import SINGLE as SINGLE
from moesaic.models.pages import PAGE, align_size, huge_pages, prefer_huge
from moesaic.models.quantization.scheme import Matrix

Bytes = npt.NDArray[np.uint8]
CHUNK = 64 << 20
"""Bytes that are allocated at a time, or one slot if that is larger."""


class Store:
    """The loaded experts of a server, as tables of addresses by layer."""

    def __init__(self, path: Path, layout: ExpertLayout, mapped: bool = True) -> None:
        self.layout = layout
        mapped = mapped and layout.form == ROWS  # others are always copied, as rows
        self._checkpoint = _Checkpoint(path, _Mapped().part if mapped else _read)
        self._slots = None if mapped else Slots(layout.matrix_bytes)
        self._tables = {
            layer: np.zeros((PARTS[layout.form], layout.num_experts), dtype=np.uint64)
            for layer in layout.prefixes
        }
        self._held: dict[tuple[int, int], list[Bytes]] = {}
        self._places: dict[tuple[int, int], Bytes] = {}
        """The slot of each expert that was copied."""

    def table(self, layer: int) -> npt.NDArray[np.uint64]:
        """[3, E] addresses of the gate, up and down matrices, 0 for experts that are not loaded. With biases
        [6, E]: then those of the biases of gate, up and down."""
        return self._tables[layer]

    @property
    def held(self) -> dict[int, list[int]]:
        """Layer -> the loaded experts, ascending."""
        held: dict[int, list[int]] = {}
        for layer, expert in sorted(self._held):
            held.setdefault(layer, []).append(expert)
        return held

    def take(self, wanted: Mapping[int, Iterable[int]]) -> None:
        """Load these experts too, and read their pages. wanted: layer -> expert ids.

        Raises CheckpointError for an expert that does not exist or cannot be read.
        """
        for layer, experts in wanted.items():
            if layer not in self.layout.prefixes:
                raise CheckpointError(f"{self._checkpoint.path}: layer {layer} has no routed experts")
            for expert in experts:
                if (layer, expert) not in self._held:
                    self._take(layer, expert)

    def keep(self, wanted: Mapping[int, Iterable[int]]) -> None:
        """Drop all experts except these. wanted: layer -> expert ids."""
        kept = {(layer, expert) for layer, experts in wanted.items() for expert in experts}
        for layer, expert in set(self._held) - kept:
            self._tables[layer][:, expert] = 0
            del self._held[layer, expert]
            if self._slots is not None:
                self._slots.give_back(self._places.pop((layer, expert)))

    def _take(self, layer: int, expert: int) -> None:
        if not 0 <= expert < self.layout.num_experts:
            raise CheckpointError(f"experts: got {expert}; allowed: 0 to {self.layout.num_experts - 1}")
        stored, down = (STORED.get(one, one) for one in of_matrices(self.layout.dtype_of(layer)))
        tensors = self.layout.tensors(layer, expert)
        kinds = [stored, down] if self.layout.form == COLUMNS else [stored, stored, down]
        parts = [
            self._checkpoint.part(name, *shape, stored=kind)
            for (name, *shape), kind in zip(tensors, [*kinds, "F32", "F32"], strict=False)
        ]
        if self.layout.form == COLUMNS:
            parts = as_rows(parts, WIDTHS[stored], self.layout.width)
        if self.layout.form == DOWN_COLUMNS:
            parts = [*parts[:2], transpose_bytes(parts[2], WIDTHS[stored], self.layout.width)]
        if self.layout.form == BIASED_ROWS:
            parts = [*parts[:3], *bias_rows(parts[3], self.layout.width), parts[4]]
        if self._slots is not None:
            self._places[layer, expert], parts = self._slots.copy(parts)
        self._held[layer, expert] = parts
        self._tables[layer][:, expert] = [part.ctypes.data for part in parts]


class _Checkpoint:
    """The experts' tensors of one checkpoint directory."""

    def __init__(self, path: Path, part: Callable[[Place], Bytes]) -> None:
        """part: returns the bytes of a place, or fewer when the file ends before it."""
        self.path = path
        self._headers = Headers(path)
        self._part = part

    def part(self, name: str, *shape: int, stored: str) -> Bytes:
        """The bytes of a matrix or vector in type `stored`: a view when the file has that type, else a
        converted copy.
        """
        matrix = self._headers.find_quantized(name, *shape)
        if matrix is not None:
            return self._quantized(matrix, stored)
        place = self._headers.find(name, *shape)
        part = self._whole(name, place)
        if place.dtype != stored:
            return _as(stored, part, place, name, shape[-1])
        return part.copy() if part.ctypes.data % WIDTHS[place.dtype] else part

    def _quantized(self, matrix: Matrix, stored: str) -> Bytes:
        """The bytes of a quantised matrix in type `stored`."""
        read = self._headers.reader(lambda place: self._whole(matrix.name, place))
        try:
            if matrix.dtype == stored:
                return matrix.pack_rows(read).reshape(-1)
            floats = matrix.floats(read).reshape(-1).view(np.uint8)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if stored not in NUMBERS:
            problem = f"an expert is stored as {matrix.dtype}; allowed: {stored}, as others"
            raise CheckpointError(f"{self.path}: tensor {matrix.name}: {problem}")
        return floats if stored == "F32" else _converted(floats, "F32", stored)

    def _whole(self, name: str, place: Place) -> Bytes:
        part = self._part(place)
        if len(part) < place.size:
            raise CheckpointError(f"{place.file}: truncated since its header was read: tensor {name}")
        return part


def _read(place: Place) -> Bytes:
    """Read the bytes of a place from its file."""
    try:
        return np.fromfile(place.file, np.uint8, place.size, offset=place.offset)
    except OSError as error:
        raise CheckpointError(f"{place.file}: cannot be read ({error})") from error


class _Mapped:
    """Mapped files. Every page is touched at loading, so that the first requests do not wait for the disk."""

    def __init__(self) -> None:
        self._files: dict[Path, Bytes] = {}

    def part(self, place: Place) -> Bytes:
        part = self._map(place.file)[place.offset : place.offset + place.size]
        part[::PAGE].max(initial=0)
        return part

    def _map(self, file: Path) -> Bytes:
        if file not in self._files:
            try:
                with file.open("rb") as opened:
                    mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file}: cannot be mapped ({error})") from error
            self._files[file] = whole = np.frombuffer(mapped, dtype=np.uint8)
            prefer_huge(whole.ctypes.data, whole.size)
        return self._files[file]


def _as(stored: str, part: Bytes, place: Place, name: str, columns: int) -> Bytes:
    """A copy of a matrix in another type. Raises CheckpointError when `stored` is the compressed type."""
    if stored not in NUMBERS:
        problem = f"an expert is stored as {place.dtype}; allowed: {stored}, as others"
        raise CheckpointError(f"{place.file}: tensor {name}: {problem}")
    if place.dtype != COMPRESSED_ROWS:
        return _converted(part, place.dtype, stored)
    bits = decompress(part.reshape(place.shape), columns).reshape(-1).view(np.uint8)
    return bits if stored == "BF16" else _converted(bits, "BF16", stored)


def _converted(part: Bytes, kind: str, stored: str) -> Bytes:
    """A copy in another type, rounded to nearest even where that is narrower. NaN stays NaN."""
    if kind == "BF16":
        wide = (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = part.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)
    if stored == "F32":
        return wide.view(np.uint8)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(wide)] = 0x7FC0
    return rounded.astype(np.uint16).view(np.uint8)


class Slots:
    """Slots that have room for the matrices of one expert each. A matrix may be smaller than its room.

    They have the experts that are copied, not mapped from the checkpoint's files. All experts of a layout
    have the same size. Slots that were given back are used again first. So memory grows only with the maximum
    number of experts loaded at a time, however often experts move between servers.

    >>> slots = Slots([3, 5])
    >>> slot, parts = slots.copy([np.full(3, 7, np.uint8), np.full(5, 9, np.uint8)])
    >>> parts[1].tolist()
    [9, 9, 9, 9, 9]
    >>> slots.give_back(slot)
    >>> slots.copy(parts)[0] is slot
    True
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: bytes of each matrix of an expert, or more."""
        self._sizes = tuple(sizes)
        self._slot = sum(map(align_size, sizes))
        self._free: list[Bytes] = []

    def copy(self, parts: Sequence[Bytes]) -> tuple[Bytes, list[Bytes]]:
        """Copy the matrices into a slot. Returns the slot and its views of the matrices."""
        if not self._free:
            self._grow()
        slot, copies, begin = self._free.pop(), [], 0
        for part, size in zip(parts, self._sizes, strict=True):
            copy = slot[begin : begin + len(part)]
            copy[:] = part
            copies.append(copy)
            begin += align_size(size)
        return slot, copies

    def give_back(self, slot: Bytes) -> None:
        """Return a slot that is not read any more."""
        self._free.append(slot)

    def _grow(self) -> None:
        slots = max(1, CHUNK // self._slot)
        memory = np.frombuffer(huge_pages(slots * self._slot), dtype=np.uint8)
        self._free = [memory[i * self._slot : (i + 1) * self._slot] for i in reversed(range(slots))]
