"""Finds the tensors of a safetensors directory from the files' headers alone, and without torch.

A file is eight bytes of length (little-endian), a JSON header of that length, then the tensors. The header
maps each name to its dtype, shape and data_offsets [begin, end], counted from the header's end. A directory
has one file, or several files and an index that maps tensors to files (safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import BIASED_ROWS, ROWS, ExpertLayout
from moesaic.core.weight_types import COMPRESSED_DTYPE, row_bytes, split_dtype
from moesaic.models import fused_tensors
from moesaic.models.files import INDEX as INDEX
from moesaic.models.files import INDEX_BYTES, read_json
from moesaic.models.files import SINGLE as SINGLE
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.gguf.blocks import row_bytes as gguf_row_bytes
from moesaic.models.gguf.header import is_gguf
from moesaic.models.gguf.model import Model
from moesaic.models.quantization.parse import find, scheme_of
from moesaic.models.quantization.scheme import Array, Bytes, Matrix, Part, as_array

MOST_HEADER = 100_000_000
"""Largest header in bytes, as in the safetensors library."""
NUMBERS = {"F32": 4, "BF16": 2, "F16": 2}
"""Supported data types of numbers -> bytes per number."""
METADATA = "__metadata__"
"""Key of a header that is no tensor."""
COMPRESSED_ROWS = "U8"
"""Data type in files of compressed matrices, whose rows are bytes."""
WIDTHS = {**NUMBERS, COMPRESSED_ROWS: 1}
BYTES = {**WIDTHS, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}
"""The same with the types that parts of quantised matrices may have."""
STORED = {"float32": "F32", "bfloat16": "BF16", COMPRESSED_DTYPE: COMPRESSED_ROWS}
"""Data type that weights are computed from -> its name in files."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is stored: dense and row-major."""

    file: Path
    offset: int
    """Offset of its first byte in the file. It can be any number, since files need not be aligned."""
    size: int
    """Size in bytes."""
    dtype: str
    """The type as the header has it. It is a key of WIDTHS where `Headers.find` returned the place."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Header:
    file: Path
    """The same object in every Place of this file."""
    begin: int
    """Offset of the tensors in the file."""
    size: int
    """Size in bytes of all tensors."""
    entries: dict[str, Any]


class Headers:
    """The headers of one directory or GGUF model. Each is read when one of its tensors is first looked up.

    Raises CheckpointError, in one line, for tensors that are missing, damaged or of another shape or type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._headers: dict[str, _Header] = {}
        if is_gguf(path):
            self._list = path
            self._shards = self._read_gguf(path)
        else:
            self._list = path / INDEX
            self._shards = _index(path)
        self._scheme = scheme_of(path)

    def find_quantized(self, name: str, *shape: int) -> Matrix | None:
        """The tensor `name` [rows, columns] as a quantised matrix; None if the files have it as it is."""
        return find(self._scheme, name, shape, self._kind)

    def places(self, name: str, *shape: int) -> dict[str, Place]:
        """Tensor -> its place, for all tensors that a matrix or vector is made of."""
        matrix = self.find_quantized(name, *shape)
        if matrix is None:
            return {name: self.find(name, *shape)}
        return {part.tensor: self.place(part) for part in matrix.parts}

    def place(self, part: Part) -> Place:
        """The place of the whole tensor of a part of a quantised matrix."""
        header = self._header(part.tensor)
        entry = header.entries.get(part.tensor)
        if not isinstance(entry, dict):
            raise CheckpointError(f"{header.file}: tensor {part.tensor} is missing")
        tensor_place = _any_place(part.tensor, entry, header)
        try:
            part.check(tensor_place.dtype, tensor_place.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{header.file}: {error}") from None
        if tensor_place.size != _size(tensor_place.dtype, tensor_place.shape):
            problem = f"tensor {part.tensor} has {tensor_place.size} bytes"
            raise CheckpointError(f"{header.file}: truncated or corrupt: {problem}")
        return tensor_place

    def locate_part(self, part: Part) -> tuple[Place, Part]:
        """The place of what belongs to a matrix, and the part of a tensor that is only there.

        It is that of one expert where a tensor has all experts of a layer, or of some of its rows if these
        follow one another.
        """
        whole_place, first = self.place(part), part.index[0] if part.index else None
        if not isinstance(first, int):
            return whole_place, part
        size, shape, index = whole_place.size // whole_place.shape[0], whole_place.shape[1:], part.index[1:]
        offset = whole_place.offset + first * size
        rows = range(shape[0])[index[0]] if index and isinstance(index[0], slice) else range(0)
        if rows and rows.step == 1:
            row_size = size // shape[0]
            offset, size = offset + rows.start * row_size, len(rows) * row_size
            shape, index = (len(rows), *shape[1:]), (slice(None), *index[1:])
        return Place(whole_place.file, offset, size, whole_place.dtype, shape), replace(part, index=index)

    def is_stored(self, layout: ExpertLayout, layer: int) -> bool:
        """Whether the files have a layer's experts as the kernels read them, so that nothing is converted."""
        inner, outer = split_dtype(layout.dtype_of(layer))
        if layout.form not in (ROWS, BIASED_ROWS):
            return False
        # Biases follow the matrices, and have types that the kernels read, or are put together from others.
        types = [inner, inner, outer, "float32", "float32"]
        return all(
            self._is_stored(dtype, *tensor)
            for dtype, tensor in zip(types, layout.tensors(layer, 0), strict=False)
        )

    def _is_stored(self, dtype: str, name: str, *shape: int) -> bool:
        """Whether a matrix, or the biases of an expert, is stored in a type, and not quantised otherwise."""
        matrix = self.find_quantized(name, *shape)
        if matrix is None:
            return len(shape) == 2 and self.find(name, *shape).dtype == STORED.get(dtype)
        return matrix.is_stored and matrix.dtype == dtype

    def reader(self, read_bytes: Callable[[Place], Bytes]) -> Callable[[Part], Array]:
        """What `Matrix.pack_rows` and `Matrix.floats` call. read_bytes: returns the bytes of a place."""

        def read(part: Part) -> Array:
            place, own_part = self.locate_part(part)
            return as_array(read_bytes(place), place.dtype, own_part, place.shape)

        return read

    def _kind(self, name: str) -> str | None:
        """The type of a tensor in the files; None if they do not have it."""
        entry = self._entries(name).get(name) if self._has_tensor(name) else None
        return str(entry.get("dtype")) if isinstance(entry, dict) else None

    def find(self, name: str, *shape: int) -> Place:
        """Finds a tensor of exactly this shape, possibly compressed, and checks that the file is complete.

        The place of an expert's matrix may be within a larger tensor (fused.py).
        """
        fused_part = fused_tensors.find_fused_part(name, self._has_tensor)
        if fused_part is not None:
            return self._locate_fused(fused_part, *shape)
        shard = self._shards.get(name, INDEX) if self._shards else SINGLE
        if shard == INDEX:
            raise CheckpointError(f"{self._list}: tensor {name} is missing")
        header = self._headers.get(shard) or self._open(shard)
        file, entry = header.file, header.entries.get(name)
        if not isinstance(entry, dict):
            raise CheckpointError(f"{file}: tensor {name} is missing")
        kind, file_shape = str(entry.get("dtype")), entry.get("shape")
        allowed_types = f"{', '.join(NUMBERS)} {list(shape)}"
        if kind == COMPRESSED_ROWS and len(shape) == 2:
            shape = shape[0], row_bytes(COMPRESSED_DTYPE, shape[1])
            allowed_types += f", {kind} {list(shape)} (compressed)"
        if kind not in WIDTHS or file_shape != list(shape) or (kind == COMPRESSED_ROWS and len(shape) != 2):
            raise CheckpointError(f"{file}: tensor {name}: got {kind} {file_shape}; allowed: {allowed_types}")
        span, size = entry.get("data_offsets"), math.prod(shape) * WIDTHS[kind]
        if not _fits(span, size, header.size):
            place = f"{size} bytes at {span} of {header.size}"
            raise CheckpointError(f"{file}: truncated or corrupt: tensor {name} has {place}")
        return Place(file, header.begin + span[0], size, kind, shape)

    def _locate_fused(self, fused_part: fused_tensors.FusedPart, *shape: int) -> Place:
        """The place of a part of this shape in a fused tensor, whose numbers are not compressed."""
        entry = self._entries(fused_part.tensor).get(fused_part.tensor)
        file_shape = entry.get("shape") if isinstance(entry, dict) else None
        experts = fused_part.experts(file_shape if isinstance(file_shape, list) else [], shape[0])
        whole_place = self.find(fused_part.tensor, *fused_part.tensor_shape(experts, *shape))
        width = WIDTHS[whole_place.dtype]
        if whole_place.dtype == COMPRESSED_ROWS:
            raise CheckpointError(
                f"{whole_place.file}: tensor {fused_part.tensor}: got {whole_place.dtype}; allowed: numbers"
            )
        offset = whole_place.offset + width * fused_part.first(*shape)
        return Place(whole_place.file, offset, width * math.prod(shape), whole_place.dtype, shape)

    def _has_tensor(self, name: str) -> bool:
        return name in self._shards if self._shards else name in self._entries(name)

    def _entries(self, name: str) -> dict[str, Any]:
        """The entries of the file that has or would have this tensor."""
        return self._header(name).entries

    def _header(self, name: str) -> _Header:
        shard = self._shards.get(name, INDEX) if self._shards else SINGLE
        if shard == INDEX:
            raise CheckpointError(f"{self._list}: tensor {name} is missing")
        return self._headers.get(shard) or self._open(shard)

    @property
    def files(self) -> list[Path]:
        """The files with tensors, and the index if there is one."""
        shards = sorted(set(self._shards.values()))
        if is_gguf(self.path):
            return [self.path.parent / name for name in shards]
        return [self.path / name for name in ([INDEX, *shards] if shards else [SINGLE])]

    def list_tensors(self) -> dict[str, Place]:
        """Every tensor of the directory by name, in the order of the names. A data type can be any word."""
        places = {}
        for shard in sorted(set(self._shards.values())) or [SINGLE]:
            header = self._headers.get(shard) or self._open(shard)
            for name, entry in header.entries.items():
                if name != METADATA and self._shards.get(name, shard) == shard:
                    places[name] = _any_place(name, entry, header)
        return dict(sorted(places.items()))

    def _read_gguf(self, path: Path) -> dict[str, str]:
        """Fills in the headers of a GGUF model's files. Returns tensor -> file."""
        shards = {}
        for name, (file, tensor) in Model(path).tensors.items():
            header = self._headers.setdefault(file.name, _Header(file, 0, file.stat().st_size, {}))
            span = [tensor.offset, tensor.offset + tensor.size]
            header.entries[name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": span}
            shards[name] = file.name
        return shards

    def _open(self, shard: str) -> _Header:
        file = self.path / shard
        try:
            header = self._headers[shard] = _read(file)
        except (
            OSError,
            ValueError,
            RecursionError,
        ) as error:  # RecursionError: JSON that is nested too deeply
            raise CheckpointError(f"{file}: not a safetensors file ({error})") from error
        return header


def _size(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    if kind in BLOCKS:
        return math.prod(shape[:-1]) * gguf_row_bytes(kind, shape[-1])
    return math.prod(shape) * BYTES[kind]


def _index(path: Path) -> dict[str, str]:
    """Returns tensor -> file; empty if all tensors are in one file."""
    file = path / INDEX
    if not file.is_file():
        return {}
    try:
        table = read_json(file, INDEX_BYTES)["weight_map"]
        # Only the last part of a path, so that an index cannot name a file outside of its directory.
        names = {str(name): Path(shard).name for name, shard in table.items()}
        if not all(map(str.isprintable, set(names.values()))):
            raise TypeError("a file's name is not printable")
        return names
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not an index of tensors ({error!r})") from error


def _read(file: Path) -> _Header:
    """Reads a file's header. Raises OSError or ValueError."""
    with file.open("rb") as stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        begin = 8 + length
        if begin > size:
            raise ValueError(f"its header has {begin} bytes, but the file {size}")
        if length > MOST_HEADER:
            raise ValueError(f"its header has {length} bytes; allowed: at most {MOST_HEADER}")
        entries = json.loads(stream.read(length))
    if not isinstance(entries, dict):
        raise ValueError(f"its header is a {type(entries).__name__}")
    _check_ranges(entries, size - begin)
    return _Header(file, begin, size - begin, entries)


def _any_place(name: str, entry: Any, header: _Header) -> Place:
    """Where a tensor of any data type is. Raises CheckpointError for an entry that says no such place."""
    shape, span = (entry.get("shape"), entry.get("data_offsets")) if isinstance(entry, dict) else (None, None)
    if not _is_shape(shape) or not _fits(span, None, header.size):
        raise CheckpointError(f"{header.file}: truncated or corrupt: tensor {name} has no bytes in the file")
    begin, end = span
    return Place(header.file, header.begin + begin, end - begin, str(entry.get("dtype")), tuple(shape))


def _check_ranges(entries: dict[str, Any], size: int) -> None:
    """Raises ValueError unless the tensors follow one another and fill the file. `find` checks each size."""
    spans = [entry.get("data_offsets") for entry in entries.values() if isinstance(entry, dict)]
    ranges = sorted((span[0], span[1]) for span in spans if _fits(span, None, size))
    end = 0
    for begin, stop in ranges:
        if begin != end:
            raise ValueError(f"truncated or corrupt: overlap or gap at byte {begin}, after byte {end}")
        end = stop


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    return isinstance(shape, list) and all(type(size) is int for size in shape)


def _fits(span: Any, size: int | None, length: int) -> TypeGuard[list[int]]:
    """Whether `span`, read from a file, is a range [begin, end] of `size` bytes (None: any) within `length`
    bytes."""
    is_range = isinstance(span, list) and [type(end) for end in span] == [int, int]
    return is_range and 0 <= span[0] <= span[1] <= length and size in (None, span[1] - span[0])
