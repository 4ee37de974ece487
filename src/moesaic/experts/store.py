"""The weights of an expert server, read from the checkpoint with numpy alone.

A matrix that the checkpoint stores in the type that the kernels read, such as the blocks of a GGUF file,
stays in the mapped file. So processes of one host share its pages, and loading an expert only needs the
header of the file. Other types are converted once. Without mapping, experts are read into memory of the
server's own. So are experts in columns, which the kernels read as rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import (
    BIASED_ROWS,
    COLUMNS,
    DOWN_COLUMNS,
    HALF_COLUMNS,
    PARTS,
    ROWS,
    ExpertLayout,
)
from moesaic.core.weight_types import split_dtype
from moesaic.kernels.compressed_layout import decompress
from moesaic.models.columns import as_rows, bias_rows, halves_as_rows, transpose_bytes
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

    def __init__(self, path: Path, layout: ExpertLayout, use_mmap: bool = True) -> None:
        self.layout = layout
        headers = Headers(path)
        # Others are always copied, as rows.
        use_mmap = use_mmap and (
            layout.form == ROWS or all(headers.is_stored(layout, layer) for layer in layout.layers)
        )
        self._checkpoint = _Checkpoint(headers, _MappedFiles().part if use_mmap else _read)
        self._slots: dict[tuple[int, ...], Slots] | None = None if use_mmap else {}
        """Sizes of an expert's matrices -> the slots of experts of these sizes. None: experts are mapped."""
        self._tables = {
            layer: np.zeros((PARTS[layout.form], layout.num_experts), dtype=np.uint64)
            for layer in layout.prefixes
        }
        self._matrices: dict[tuple[int, int], list[Bytes]] = {}
        self._places: dict[tuple[int, int], Bytes] = {}
        """The slot of each expert that was copied."""

    def table(self, layer: int) -> npt.NDArray[np.uint64]:
        """[3, E] addresses of the gate, up and down matrices, 0 for experts that are not loaded. With biases
        [6, E]: then those of the biases of gate, up and down."""
        return self._tables[layer]

    @property
    def resident_experts(self) -> dict[int, list[int]]:
        """Layer -> the loaded experts, ascending."""
        experts_by_layer: dict[int, list[int]] = {}
        for layer, expert in sorted(self._matrices):
            experts_by_layer.setdefault(layer, []).append(expert)
        return experts_by_layer

    def load(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        """Load these experts too, and read their pages. experts_by_layer: layer -> expert ids.

        Raises CheckpointError for an expert that does not exist or cannot be read.
        """
        for layer, experts in experts_by_layer.items():
            if layer not in self.layout.prefixes:
                raise CheckpointError(f"{self._checkpoint.path}: layer {layer} has no routed experts")
            for expert in experts:
                if (layer, expert) not in self._matrices:
                    self._load_expert(layer, expert)

    def keep_only(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        """Drop all experts except these. experts_by_layer: layer -> expert ids."""
        kept_pairs = {(layer, expert) for layer, experts in experts_by_layer.items() for expert in experts}
        for layer, expert in set(self._matrices) - kept_pairs:
            self._tables[layer][:, expert] = 0
            del self._matrices[layer, expert]
            if self._slots is not None:
                self._slots_of(self._slots, layer).give_back(self._places.pop((layer, expert)))

    def _slots_of(self, slots: dict[tuple[int, ...], Slots], layer: int) -> Slots:
        sizes = self.layout.bytes_of(self.layout.dtype_of(layer))
        if sizes not in slots:
            slots[sizes] = Slots(sizes)
        return slots[sizes]

    def _load_expert(self, layer: int, expert: int) -> None:
        if not 0 <= expert < self.layout.num_experts:
            raise CheckpointError(f"experts: got {expert}; allowed: 0 to {self.layout.num_experts - 1}")
        dtype, down_dtype = (STORED.get(one, one) for one in split_dtype(self.layout.dtype_of(layer)))
        tensors = self.layout.tensors(layer, expert)
        is_fused = self.layout.form in (COLUMNS, HALF_COLUMNS)
        kinds = [dtype, down_dtype] if is_fused else [dtype, dtype, down_dtype]
        parts = [
            self._checkpoint.part(name, *shape, dtype=kind)
            # Experts without biases have fewer tensors than kinds.
            for (name, *shape), kind in zip(tensors, [*kinds, "F32", "F32"], strict=False)
        ]
        if self.layout.form == COLUMNS:
            parts = as_rows(parts, WIDTHS[dtype], self.layout.width)
        if self.layout.form == HALF_COLUMNS:
            parts = halves_as_rows(parts, WIDTHS[dtype], self.layout.width)
        if self.layout.form == DOWN_COLUMNS:
            parts = [*parts[:2], transpose_bytes(parts[2], WIDTHS[dtype], self.layout.width)]
        if self.layout.form == BIASED_ROWS:
            parts = [*parts[:3], *bias_rows(parts[3], self.layout.width), parts[4]]
        if self._slots is not None:
            self._places[layer, expert], parts = self._slots_of(self._slots, layer).copy(parts)
        self._matrices[layer, expert] = parts
        self._tables[layer][:, expert] = [part.ctypes.data for part in parts]


class _Checkpoint:
    """The experts' tensors of one checkpoint directory."""

    def __init__(self, headers: Headers, part: Callable[[Place], Bytes]) -> None:
        """part: returns the bytes of a place, or fewer when the file ends before it."""
        self.path = headers.path
        self._headers = headers
        self._part = part

    def part(self, name: str, *shape: int, dtype: str) -> Bytes:
        """The bytes of a matrix or vector in type `dtype`: a view when the file has that type, else a
        converted copy.
        """
        matrix = self._headers.find_quantized(name, *shape)
        if matrix is not None:
            return self._read_quantized(matrix, dtype)
        place = self._headers.find(name, *shape)
        part = self._read_place(name, place)
        if place.dtype != dtype:
            return _convert_matrix(dtype, part, place, name, shape[-1])
        # A file may place a tensor at any byte, and the kernels read aligned numbers.
        return part.copy() if part.ctypes.data % WIDTHS[place.dtype] else part

    def _read_quantized(self, matrix: Matrix, dtype: str) -> Bytes:
        """The bytes of a quantised matrix in type `dtype`: those of the file if it has them in this type."""
        read = self._headers.reader(lambda place: self._read_place(matrix.name, place))
        try:
            if dtype in (matrix.dtype, matrix.conversion):
                return matrix.pack_rows(read, dtype=dtype).reshape(-1)
            floats = matrix.floats(read).reshape(-1).view(np.uint8)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if dtype not in NUMBERS:
            problem = f"an expert is stored as {matrix.dtype}; allowed: {dtype}, as others"
            raise CheckpointError(f"{self.path}: tensor {matrix.name}: {problem}")
        return floats if dtype == "F32" else _convert_numbers(floats, "F32", dtype)

    def _read_place(self, name: str, place: Place) -> Bytes:
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


class _MappedFiles:
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
                with file.open("rb") as stream:
                    mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file}: cannot be mapped ({error})") from error
            self._files[file] = contents = np.frombuffer(mapping, dtype=np.uint8)
            prefer_huge(contents.ctypes.data, contents.size)
        return self._files[file]


def _convert_matrix(dtype: str, part: Bytes, place: Place, name: str, columns: int) -> Bytes:
    """A copy of a matrix in another type. Raises CheckpointError when `dtype` is the compressed type."""
    if dtype not in NUMBERS:
        problem = f"an expert is stored as {place.dtype}; allowed: {dtype}, as others"
        raise CheckpointError(f"{place.file}: tensor {name}: {problem}")
    if place.dtype != COMPRESSED_ROWS:
        return _convert_numbers(part, place.dtype, dtype)
    bits = decompress(part.reshape(place.shape), columns).reshape(-1).view(np.uint8)
    return bits if dtype == "BF16" else _convert_numbers(bits, "BF16", dtype)


def _convert_numbers(part: Bytes, kind: str, dtype: str) -> Bytes:
    """A copy in another type, rounded to nearest even where that is narrower. NaN stays NaN."""
    if kind == "BF16":
        wide = (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = part.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)
    if dtype == "F32":
        return wide.view(np.uint8)
    bits = wide.view(np.uint32)
    rounded_bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding could carry the bits of a NaN into those of an infinity.
    rounded_bits[np.isnan(wide)] = 0x7FC0
    return rounded_bits.astype(np.uint16).view(np.uint8)


class Slots:
    """Slots that have room for the matrices of one expert each. A matrix may be smaller than its room.

    They have the experts that are copied, not mapped from the checkpoint's files. Slots that were given back
    are used again first. So memory grows only with the maximum number of experts loaded at a time, however
    often experts move between servers.

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
