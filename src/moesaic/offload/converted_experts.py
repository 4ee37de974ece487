"""Routed experts that the files do not have as the kernels read them, of a model larger than the fast memory.

They are in columns (see `core.experts.ExpertLayout.form`), quantised by another program, or compressed while
the kernels do not read that. So each expert is read into memory that all share, and converted from there to
its place. A page is a number of whole experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import COLUMNS, DOWN_COLUMNS, FORMS_WITH_BIASES, HALF_COLUMNS, ExpertLayout
from moesaic.core.weight_types import row_bytes, split_dtype
from moesaic.kernels.compressed_layout import decompress
from moesaic.models.columns import transpose
from moesaic.models.headers import COMPRESSED_ROWS, Headers, Place
from moesaic.models.pages import align_size
from moesaic.models.quantization.scheme import Bytes
from moesaic.offload.arena import Arena
from moesaic.offload.arrangement import Arrangement
from moesaic.offload.by_expert import Expert, Reader, StreamedByExpert, memory_of
from moesaic.offload.weights import DTYPES, Files, Memory, Plan

NUMBERS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of numbers in files."""
ReadBytes = Callable[[Place], Bytes]
"""Returns the bytes of a place, which have been read."""


class ConvertingReader(Reader):
    """Reads an expert to memory that all share, and converts it from there to its place."""

    def __init__(self, plan: Plan, layout: ExpertLayout, files: Files, staging: torch.Tensor) -> None:
        """staging: [bytes] uint8, which every expert passes through."""
        self._plan, self._layout, self._files, self._staging = plan, layout, files, staging
        self._convert = CONVERSIONS.get(layout.form, _convert_packed)

    @staticmethod
    def sizes(plan: Plan, layout: ExpertLayout) -> tuple[dict[int, int], int]:
        """Layer -> bytes of a place for one of its experts, and bytes of the memory that experts pass
        through."""
        staging = max((Arrangement(parts).size for parts in plan.places.values()), default=0)
        return dense_sizes(layout), staging

    def load(self, layer: int, expert: int, place: torch.Tensor) -> int:
        """Reads one expert and converts it to its place. Returns the bytes read."""
        arrangement = Arrangement(self._plan.places[layer, expert])
        size = self._files.read(arrangement, [(0, arrangement.size)], self._staging)
        self.put(layer, expert, place)
        return size

    def tensors(self, layer: int, expert: int, place: torch.Tensor) -> Expert:
        """The tensors of an expert in this place."""
        return dense_expert(place, self._layout, layer)

    def put(self, layer: int, expert: int, place: torch.Tensor) -> None:
        """Converts an expert that has been read to its place."""
        arrangement, memory = Arrangement(self._plan.places[layer, expert]), self._staging.numpy()
        target = self.tensors(layer, expert, place)

        def read_bytes(place: Place) -> Bytes:
            offset = arrangement.memory_offsets[place]
            data: Bytes = memory[offset : offset + place.size]
            return data

        self._convert(self._plan.headers, self._layout, layer, expert, read_bytes, target)
        if self._layout.form in FORMS_WITH_BIASES:
            _put_biases(self._plan.headers, self._layout, layer, expert, read_bytes, target)


class StreamedConvertedExperts(StreamedByExpert):
    """Streamed experts that are converted on their way to memory. The arguments are those of
    StreamedExperts."""

    _reader: ConvertingReader

    def convert_again(self, count: int, layer: int, expert: int) -> None:
        """Converts the expert that was loaded last, at turn `count`, once more."""
        self._reader.put(layer, expert, self._streamed_places[layer][expert][count % 2])

    @staticmethod
    def _memory(plan: Plan, layout: ExpertLayout) -> Memory:
        return memory_of(plan, layout, *ConvertingReader.sizes(plan, layout))

    def _create_reader(self, layout: ExpertLayout) -> tuple[Reader, dict[int, int]]:
        return ConvertingReader(self._plan, layout, self._files, self._staging), dense_sizes(layout)


def repeat_conversion(path: Path, layout: ExpertLayout, layer: int) -> Callable[[], object]:
    """A function that converts the first expert of a layer, whose bytes are in memory, to the same place."""
    owned_experts = {layer_id: [0] for layer_id in layout.layers}
    memory = StreamedConvertedExperts.memory_for(path, layout, {}, owned_experts)
    streamed_experts = StreamedConvertedExperts(
        path, layout, {}, Arena(memory.total), owned_experts=owned_experts
    )
    streamed_experts.load_chosen(0, layer, [0])
    streamed_experts.close()
    return partial(streamed_experts.convert_again, 0, layer, 0)


def _convert_columns(
    headers: Headers, layout: ExpertLayout, layer: int, expert: int, read_bytes: ReadBytes, target: Expert
) -> None:
    """Transposes the matrices of an expert."""
    gate_up, down_proj = (
        _numbers(headers.find(*part), read_bytes) for part in layout.tensors(layer, expert)[:2]
    )
    if layout.form == HALF_COLUMNS:
        gate_proj, up_proj = gate_up[:, : layout.width], gate_up[:, layout.width :]
    else:
        gate_proj, up_proj = gate_up[:, 0::2], gate_up[:, 1::2]
    for part_target, matrix in zip(target[:3], (gate_proj, up_proj, down_proj), strict=True):
        transpose(matrix, part_target)


def _convert_down_columns(
    headers: Headers, layout: ExpertLayout, layer: int, expert: int, read_bytes: ReadBytes, target: Expert
) -> None:
    """Copies gate and up, and transposes down."""
    gate_proj, up_proj, down_proj = (
        _numbers(headers.find(*part), read_bytes) for part in layout.tensors(layer, expert)
    )
    target[0].copy_(gate_proj)
    target[1].copy_(up_proj)
    transpose(down_proj, target[2])


CONVERSIONS = {
    COLUMNS: _convert_columns,
    HALF_COLUMNS: _convert_columns,
    DOWN_COLUMNS: _convert_down_columns,
}
"""Form of experts -> their conversion, where that is not from quantised or compressed ones."""


def _convert_packed(
    headers: Headers, layout: ExpertLayout, layer: int, expert: int, read_bytes: ReadBytes, target: Expert
) -> None:
    """Converts the quantised or compressed matrices of an expert to the type that the kernels read.

    Raises CheckpointError for NaN and infinite numbers.
    """
    read, (inner, outer) = headers.reader(read_bytes), split_dtype(layout.dtype_of(layer))
    matrices = zip(layout.tensors(layer, expert)[:3], target[:3], (inner, inner, outer), strict=True)
    try:
        for (name, *shape), part_target, kernel_dtype in matrices:
            matrix = headers.find_quantized(name, *shape)
            if matrix is None:
                part_target.copy_(_numbers(headers.find(name, *shape), read_bytes, shape[-1]))
            elif part_target.dtype is torch.uint8:
                matrix.pack_rows(read, part_target.view(torch.uint8).numpy(), dtype=kernel_dtype)
            else:
                part_target.copy_(torch.from_numpy(matrix.floats(read)))
    except CheckpointError as error:
        raise CheckpointError(f"{headers.path}: {error}") from None


def _put_biases(
    headers: Headers, layout: ExpertLayout, layer: int, expert: int, read_bytes: ReadBytes, target: Expert
) -> None:
    """Takes biases of gate and up apart, which take turns."""
    inner_biases, down_bias = (
        _bias(headers, read_bytes, *part) for part in layout.tensors(layer, expert)[-2:]
    )
    for part_target, bias in zip(
        target[3:], (inner_biases[0::2], inner_biases[1::2], down_bias), strict=True
    ):
        part_target.copy_(bias)


def _bias(headers: Headers, read_bytes: ReadBytes, name: str, *shape: int) -> torch.Tensor:
    """A vector, which a GGUF file may have in several tensors."""
    matrix = headers.find_quantized(name, *shape)
    if matrix is None:
        return _numbers(headers.find(name, *shape), read_bytes)
    return torch.from_numpy(matrix.floats(headers.reader(read_bytes))).view(shape)


def _numbers(place: Place, read_bytes: ReadBytes, columns: int = 0) -> torch.Tensor:
    """A tensor that is stored as it is or compressed. columns: of one that may be compressed."""
    if place.dtype == COMPRESSED_ROWS:
        bits = decompress(read_bytes(place).reshape(place.shape), columns)
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(read_bytes(place)).view(NUMBERS[place.dtype]).view(place.shape)


def dense_sizes(layout: ExpertLayout) -> dict[int, int]:
    """Layer -> bytes of the memory of one of its experts as the kernels read it."""
    return {layer: sum(map(align_size, layout.bytes_of(layout.dtype_of(layer)))) for layer in layout.layers}


def dense_expert(memory: torch.Tensor, layout: ExpertLayout, layer: int) -> Expert:
    """The tensors of an expert of this layer in its memory."""
    width, hidden, dtype = layout.width, layout.hidden, layout.dtype_of(layer)
    inner, outer = (DTYPES[matrix_type] for matrix_type in split_dtype(dtype))
    columns = row_bytes(split_dtype(dtype)[0], hidden) // inner.itemsize
    rows = row_bytes(split_dtype(dtype)[1], width) // outer.itemsize
    shapes: list[tuple[int, ...]] = [(width, columns), (width, columns), (hidden, rows)]
    shapes += [(width,), (width,), (hidden,)] if layout.form in FORMS_WITH_BIASES else []
    types = [inner, inner, outer, *[torch.float32] * 3]
    parts, offset = [], 0
    for shape, size, kind in zip(shapes, layout.bytes_of(dtype), types, strict=False):
        parts.append(memory[offset : offset + size].view(kind).view(shape))
        offset += align_size(size)
    return tuple(parts)
