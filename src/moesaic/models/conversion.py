"""What it takes to load an expert that the files do not have as the kernels read it.

Question: How many bytes does an expert have in the files, and what does loading it take?
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ROWS, TRANSPOSED_FORMS, ExpertLayout
from moesaic.core.weight_types import is_packed, join_dtypes
from moesaic.models.checkpoint import Claims
from moesaic.models.gguf.scheme import Gguf
from moesaic.models.headers import BYTES, COMPRESSED_ROWS, Headers
from moesaic.models.quantization.parse import is_left_plain as is_left_plain
from moesaic.models.quantization.parse import parse
from moesaic.models.quantization.scheme import FLOATS, Kinds, Matrix
from moesaic.models.quantization.scheme import scratch_of as scratch_of

DECOMPRESSED = "decompressed"
"""Name of the conversion of compressed experts, where the kernels do not read them."""
BLOCK = 4096
"""Bytes of a block of a disk. A tensor that is read may begin and end within blocks."""


@dataclass(frozen=True)
class Conversion:
    """How an expert comes from the files to memory."""

    name: str
    """The quantised type that it gets, "float32" for a quantised one that becomes floats of any type,
    "decompressed", or "columns", which become rows."""
    read: int
    """Bytes of the files that it has."""
    staging: int
    """The most bytes of memory that loading it takes: for whole blocks of these, and for its conversion."""


def conversion_of(headers: Headers, layout: ExpertLayout) -> Conversion | None:
    """How the experts of `layout` are converted; None if the kernels read them as the files have them.

    Layers may have experts of several types. Then `read` is a mean, and `name` the largest type in memory.
    """
    first = layout.tensors(layout.layers[0], 0)[0]
    plain = layout.form == ROWS and headers.find_quantized(*first) is None
    is_compressed = plain and headers.find(*first).dtype == COMPRESSED_ROWS
    if plain and (not is_compressed or is_packed(layout.dtype)):
        return None
    if all(headers.is_stored(layout, layer) for layer in layout.layers):
        return None
    of_types = {layout.dtype_of(layer): layer for layer in layout.layers}
    sizes = {dtype: sizes_of(headers, layout, layer) for dtype, layer in of_types.items()}
    read = sum(sizes[layout.dtype_of(layer)][0] for layer in layout.layers) // len(layout.layers)
    kind = layout.largest if is_packed(layout.largest) else "float32"
    name = "columns" if layout.form in TRANSPOSED_FORMS else DECOMPRESSED if is_compressed else kind
    return Conversion(name, read, max(staging for _, staging in sizes.values()))


def sizes_of(headers: Headers, layout: ExpertLayout, layer: int) -> tuple[int, int]:
    """`read` and `staging` of a conversion of the first expert of a layer."""
    tensors = layout.tensors(layer, 0)
    matrices = (
        [] if layout.form in TRANSPOSED_FORMS else [headers.find_quantized(*tensor) for tensor in tensors]
    )
    places = set()
    for name, *shape in tensors:
        matrix = headers.find_quantized(name, *shape)
        places |= (
            {headers.find(name, *shape)}
            if matrix is None
            else {headers.locate_part(part)[0] for part in matrix.parts}
        )
    read = sum(place.size for place in places)
    dtype = layout.dtype_of(layer)
    scratch = max((tensor.scratch(dtype) for tensor in matrices if tensor is not None), default=0)
    if any(place.dtype == COMPRESSED_ROWS for place in places) and not is_packed(dtype):
        scratch = scratch_of("bfloat16", layout.hidden * layout.width)
    # Whole blocks are read, so each tensor may bring a part of a block before it and one after it.
    return read, read + 2 * BLOCK * len(places) + scratch


def read_by_config(raw: Mapping[str, Any], hidden: int, width: int) -> int | None:
    """Bytes that files have of an expert, by a parsed config.json alone. Scales count as two bytes.

    None: it is not quantised, the model is a GGUF file, whose header says it, or its matrices do not have
    groups of the size that the config says.
    """
    try:
        matrices, tensor_bytes = _find_by_config(raw, hidden, width), dict[str, int]()
    except CheckpointError:
        return None
    for part in (part for matrix in matrices for part in matrix.parts):
        expert_shape = part.shape[1:] if part.index and isinstance(part.index[0], int) else part.shape
        size = 2 if part.dtypes == FLOATS else BYTES[part.dtypes[0]]
        tensor_bytes[part.tensor] = size * math.prod(expert_shape)
    return sum(tensor_bytes.values()) or None


def type_by_config(raw: Mapping[str, Any], hidden: int, width: int) -> str | None:
    """Type of quantised experts in memory, by a parsed config.json alone. None: as of `read_by_config`.

    Raises CheckpointError for groups that do not fit, and a quantization_config that is not understood.
    """
    matrices = _find_by_config(raw, hidden, width)
    return join_dtypes(matrices[0].dtype, matrices[-1].dtype) if matrices else None


def _find_by_config(raw: Mapping[str, Any], hidden: int, width: int) -> list[Matrix]:
    """The matrices of an expert, as a config.json describes them; empty if it does not."""
    scheme = parse(raw)
    if scheme is None or isinstance(scheme, Gguf):
        return []
    shapes = (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width))
    for kind in ("U8", "F8_E4M3", "I8"):  # the types that tell a scheme that a matrix is quantised
        matrices = [
            scheme.find(f"experts.0.{word}_proj", rows, columns, _kinds(kind))
            for word, rows, columns in shapes
        ]
        if any(matrices):
            return [matrix for matrix in matrices if matrix is not None]
    return []


def _kinds(kind: str) -> Kinds:
    return lambda name: kind if name.endswith((".weight", ".weight_packed")) else "any"


class CountingClaims(Claims):
    """A checkpoint of which nothing is read. It counts what would be."""

    bytes = 0
    """Bytes of all tensors that were asked for, in the types in which they were."""
    mapped_bytes = 0
    """Bytes of those that stay in the mapped file."""

    def tensor(self, name: str, *shape: int, **options: Any) -> torch.Tensor:
        """Claims a tensor, and counts its bytes."""
        claimed_tensor = super().tensor(name, *shape, **options)
        self.bytes += claimed_tensor.nbytes
        if self._is_mapped(name, *shape, **options):
            self.mapped_bytes += claimed_tensor.nbytes
        return claimed_tensor

    def _is_mapped(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype,
        part: tuple[slice, ...] = (),
        is_transposed: bool = False,
        packed_dtype: str | None = None,
        **_: Any,
    ) -> bool:
        """Whether `Checkpoint.tensor` would return a view of the file."""
        if is_transposed or (len(part) > 1 and len(range(shape[1])[part[1]]) < shape[1]):
            return False
        matrix = self.find_quantized(name, *shape)
        if matrix is None:
            return self.dtype(name) is dtype
        return matrix.is_stored and dtype is torch.uint8 and packed_dtype in (None, matrix.dtype)
