"""What all schemes have in common: how a matrix is stored in several tensors, and its conversion.

Only numpy is used, since expert servers do not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.core.weight_types import BLOCK_TYPES, QUANTIZATIONS, group_numbers, is_quantized
from moesaic.kernels import blocks
from moesaic.kernels.blocks import OFFSET_GROUP
from moesaic.kernels.quantized_layout import TABLES, dequantize, pack
from moesaic.models.gguf.blocks import BLOCKS, row_bytes

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
FLOATS = ("F32", "BF16", "F16")
"""Types of scales, as safetensors calls them. Readers return float32 for them."""
BAND = 128
"""Rows that are looked through at a time, so that little memory is taken."""
GROUP_SIZES = (128, 64, 32)
"""Numbers of a block of a type "int4_g..." or "int8_g...", the largest first."""
Kinds = Callable[[str], str | None]
"""Name of a tensor -> its type in the checkpoint, None if there is no such tensor."""


@dataclass(frozen=True)
class Part:
    """A tensor, or a part of one, that a matrix is made of."""

    tensor: str
    dtypes: tuple[str, ...]
    """Allowed types, as safetensors calls them."""
    shape: tuple[int, ...]
    """Shape of the whole tensor. -1: any number."""
    index: tuple[int | slice, ...] = ()
    """The part of the tensor that belongs to the matrix; empty: all of it."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Other shapes that are allowed."""

    def check(self, dtype: str | None, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the tensor may have this type and shape. None: there is no tensor."""
        if dtype is None:
            raise CheckpointError(f"tensor {self.tensor} is missing")
        allowed_shapes = [self.shape, *self.shapes]
        fits = any(
            len(allowed_shape) == len(shape)
            and all(a in (-1, b) for a, b in zip(allowed_shape, shape, strict=True))
            for allowed_shape in allowed_shapes
        )
        if self.index and isinstance(self.index[0], int) and fits:
            fits = self.index[0] < shape[0]
        if dtype not in self.dtypes or not fits:
            shapes = " or ".join(
                str(list(allowed_shape)).replace("-1", "experts") for allowed_shape in allowed_shapes
            )
            raise CheckpointError(
                f"tensor {self.tensor}: got {dtype} {list(shape)}; allowed: {', '.join(self.dtypes)} {shapes}"
            )


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix as codes, scales and offsets. See core.weight_types.Quantization."""

    codes: Bytes
    """[rows, columns], one a byte."""
    scales: Floats
    """[rows, groups]"""
    offsets: Floats | None = None
    """[rows, groups]"""


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix of a checkpoint."""

    name: str
    rows: int
    columns: int
    dtype: str
    """The type in which it is stored, for which `is_quantized` holds, or "float32" where none fits.

    A type of QUANTIZATIONS has the file's numbers in another layout. Of BLOCK_TYPES it has the file's bytes.
    """
    parts: tuple[Part, ...]
    make: Callable[..., CodedMatrix | Array]
    """Called with an array for each part. Returns [rows, columns] float32 where `dtype` is "float32", and
    bytes [rows, row_bytes] where it is a type of BLOCK_TYPES."""
    in_bf16: bool = False
    """Whether bf16 seems to hold every number: then a dense matrix is kept in bf16 if it does."""
    is_stored: bool = False
    """Whether the kernels read each part as the file has it. Then `make` only puts parts together."""

    @property
    def conversion(self) -> str:
        """`dtype` for kernels that read no blocks."""
        return BLOCK_TYPES[self.dtype].conversion if self.dtype in BLOCK_TYPES else self.dtype

    def choose_type(self, part: tuple[slice, ...], can_use_blocks: bool) -> str:
        """The type in which a part can stay for kernels that read quantised types, or "float32"."""
        types = [self.dtype, self.conversion] if can_use_blocks else [self.conversion]
        return next((dtype for dtype in types if self.cuts(part, dtype)), "float32")

    def pack_rows(
        self,
        read: Callable[[Part], Array],
        output: Bytes | None = None,
        part: tuple[slice, ...] = (),
        dtype: str | None = None,
    ) -> Bytes:
        """The bytes [rows, row_bytes] of a type, in `output` if that is given.

        They may be a view of what `read` returns, if the files have these bytes in this order.

        part: the rows and columns that are wanted, for which `cuts` holds. dtype: `self.dtype`, which is the
        default, or `conversion`. Raises CheckpointError for NaN and infinite numbers, and for scales so large
        that a code is infinite. But blocks that stay as they are stored are not looked at.
        """
        dtype, content = dtype or self.dtype, self._decode([read(part) for part in self.parts])
        if self.dtype in BLOCK_TYPES and dtype == self.dtype:
            assert not isinstance(content, CodedMatrix)
            if not self.is_stored:
                self.check_blocks(content)
            return _put(self._part_of_blocks(content, part), output)
        matrix = self._code(content, dtype)
        if not isinstance(matrix, CodedMatrix):
            self._check(matrix, "the matrix")
            return _put(np.ascontiguousarray(matrix[part], dtype="<f4").view(np.uint8), output)
        self._check_coded(matrix, QUANTIZATIONS[dtype].values)
        return pack(dtype, *self._part(dtype, *self._regroup(dtype, matrix), part), output)

    def cuts(self, part: tuple[slice, ...], dtype: str | None = None, group: int = 1) -> bool:
        """Whether a part has whole groups of each row, so that it can stay in a type, or in its own.

        group: also whole groups of this power of two.
        """
        dtype = dtype or self.dtype
        if not is_quantized(dtype):
            return False
        columns, size = range(self.columns)[(*part, slice(None), slice(None))[1]], group_numbers(dtype)
        return all(
            end % max(size, group) == 0 or end == self.columns for end in (columns.start, columns.stop)
        )

    def check_blocks(self, stored_rows: Bytes) -> None:
        """Raises CheckpointError for blocks with numbers that are NaN or infinite."""
        number = blocks.find_not_finite(self.dtype, stored_rows)
        if number is not None:
            self._refuse(str(number), "a scale")

    def _decode(self, arrays: list[Array]) -> CodedMatrix | Array:
        """What `make` returns. Its errors name one of the tensors, and get the name of the matrix here."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # packed refuses these numbers
                return self.make(*arrays)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name}.{error}") from None

    def floats(self, read: Callable[[Part], Array]) -> Floats:
        """The numbers [rows, columns]. Raises CheckpointError for NaN and infinite numbers."""
        if self.dtype not in QUANTIZATIONS:
            return self.pack_rows(read, dtype="float32").view("<f4")
        return dequantize(self.dtype, self.pack_rows(read), self.columns)

    def scratch(self, dtype: str) -> int:
        """The most bytes that `packed` or `floats` take beside a result in type `dtype`."""
        return scratch_of(dtype, self.rows * self.columns)

    def _code(self, content: CodedMatrix | Array, dtype: str) -> CodedMatrix | Floats:
        """What `make` returned, for the conversion to type `dtype`."""
        if isinstance(content, CodedMatrix) or self.dtype not in BLOCK_TYPES:
            return content
        self.check_blocks(content)
        if dtype == "float32":
            return blocks.dequantize(self.dtype, content)
        return CodedMatrix(*blocks.decode_conversion(self.dtype, content))

    def _part_of_blocks(self, stored_rows: Bytes, part: tuple[slice, ...]) -> Bytes:
        """The bytes of a part of a matrix in blocks."""
        if len(part) < 2:
            return stored_rows[part]
        columns, block = range(self.columns)[part[1]], BLOCK_TYPES[self.dtype]
        first, last = (end // block.numbers * block.size for end in (columns.start, columns.stop))
        return stored_rows[part[0], first:last]

    def _regroup(self, dtype: str, coded_matrix: CodedMatrix) -> tuple[Bytes, Floats, Floats | None]:
        """Codes, scales and offsets with groups of the size that `dtype` has."""
        groups = -(-self.columns // QUANTIZATIONS[dtype].group)
        scales, offsets = coded_matrix.scales, coded_matrix.offsets
        if scales.shape[1] != groups:
            # The file has larger groups. Each of ours gets the scale of the one that it lies in.
            group_of = np.arange(groups) * scales.shape[1] // groups
            scales, offsets = scales[:, group_of], None if offsets is None else offsets[:, group_of]
        return coded_matrix.codes, scales, offsets

    def _part(
        self, dtype: str, codes: Bytes, scales: Floats, offsets: Floats | None, part: tuple[slice, ...]
    ) -> tuple[Bytes, Floats, Floats | None]:
        """A part of what `_regroup` returns."""
        if not part:
            return codes, scales, offsets
        rows, columns = part[0], range(self.columns)[part[1] if len(part) > 1 else slice(None)]
        size = QUANTIZATIONS[dtype].group
        groups = slice(columns.start // size, -(-columns.stop // size))
        part_codes = codes[rows, columns.start : columns.stop]
        return part_codes, scales[rows, groups], None if offsets is None else offsets[rows, groups]

    def _check_coded(self, matrix: CodedMatrix, values: str) -> None:
        """Raises CheckpointError for scales, offsets and codes that are or make NaN or infinite numbers."""
        self._check(matrix.scales, "a scale")
        if matrix.offsets is not None:
            self._check(matrix.offsets, "an offset")
        with np.errstate(over="ignore"):
            # A finite scale may still give an infinite number with the largest code.
            largest = np.abs(matrix.scales) * np.nanmax(np.abs(TABLES[values]))
            self._check(largest if matrix.offsets is None else largest + np.abs(matrix.offsets), "the matrix")
        if values == "e4m3":  # the only type with codes of NaN, which no scale shows
            for begin in range(0, len(matrix.codes), BAND):
                if (matrix.codes[begin : begin + BAND] & 0x7F == 0x7F).any():
                    self._refuse("nan", "the matrix")

    def _check(self, numbers: Floats, subject: str) -> None:
        finite = np.isfinite(numbers)
        if not finite.all():
            self._refuse(str(numbers[~finite][0]), subject)

    def _refuse(self, got: str, subject: str) -> None:
        raise CheckpointError(f"tensor {self.name}: got {got} in {subject}; allowed: finite numbers")


def _put(stored_rows: Bytes, output: Bytes | None) -> Bytes:
    """The bytes themselves, or `output` with them."""
    if output is None:
        return stored_rows
    output[:] = stored_rows
    return output


def scratch_of(dtype: str, numbers: int) -> int:
    """Bytes that a conversion of so many numbers takes beside its result of type `dtype`."""
    return numbers * (12 if dtype == "float32" else 4)


def as_array(data: Bytes, dtype: str, part: Part, shape: tuple[int, ...]) -> Array:
    """The part's array. data: the bytes of the whole tensor. Numbers of FLOATS become float32.

    Rows of a type of GGUF's blocks stay bytes.
    """
    if dtype in BLOCKS:
        rows: Array = data.reshape(*shape[:-1], row_bytes(dtype, shape[-1]))
        return rows[part.index] if part.index else rows
    kind = _KINDS[dtype]
    array: Array = data.view(kind).reshape(shape)
    part_array = array[part.index] if part.index else array
    if dtype == "BF16":
        # numpy has no bf16. Its bits are the upper half of a float32.
        return (part_array.astype(np.uint32) << 16).view(np.float32)
    return part_array.astype(np.float32) if dtype == "F16" else part_array


_KINDS: dict[str, Any] = {
    "F8_E4M3": np.uint8, "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64,
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
}  # fmt: skip


class Scheme(Protocol):
    """How a program stores quantised matrices."""

    def find(self, name: str, rows: int, columns: int, kinds: Kinds, /) -> Matrix | None:
        """The matrix `name` [rows, columns], such as "model.layers.0.mlp.up_proj".

        None if the checkpoint does not have it in quantised form.
        Raises CheckpointError for sizes that the scheme cannot have.
        """
        ...


@dataclass(frozen=True)
class Groups:
    """Several schemes in one checkpoint. The tensors of a matrix say which one it has."""

    schemes: tuple[Scheme, ...]

    def find(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        matrices = (scheme.find(name, rows, columns, kinds) for scheme in self.schemes)
        return next((matrix for matrix in matrices if matrix is not None), None)


def groups_of(name: str, columns: int, size: int, unit: int) -> int:
    """Number of groups of `size` numbers in a row. -1: one group.

    unit: groups of the type that they are converted to. Raises CheckpointError if these do not fit.
    """
    if size == -1 or size >= columns:
        return 1
    if size % unit or columns % size:
        raise CheckpointError(
            f"tensor {name}: got groups of {size} in rows of {columns}; allowed: a multiple of {unit} that "
            f"divides {columns}"
        )
    return columns // size


def choose_group_type(
    bits: int, size: int, columns: int, symmetric: bool, kinds: Kinds, scales: str
) -> str | None:
    """The type of BLOCK_TYPES for integers in groups with scales, and zero points where not `symmetric`.

    None: none has groups that fit, or scales are not of 16 bits. A type with zero points of eight bits has
    scales of 32. size: numbers of a group; -1: a row is one. scales: the name of their tensor.
    """
    numbers = columns if size == -1 else math.gcd(size, columns)
    if bits == 8 and not symmetric:
        return OFFSET_GROUP if numbers % BLOCK_TYPES[OFFSET_GROUP].numbers == 0 else None
    if kinds(scales) == "F32":
        return None
    types = (f"int{bits}_g{group}" for group in GROUP_SIZES if numbers % group == 0)
    return next((dtype for dtype in types if dtype in BLOCK_TYPES), None)


def unpack(words: npt.NDArray[np.int32], bits: int, count: int) -> Bytes:
    """Codes [rows, count] of 4 or 8 bits, from words [rows, m] of 32 bits with the first in the lowest bits.

    Words are little-endian, so that their bytes are in the order of the codes.
    """
    word_bytes = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    if bits == 8:
        return word_bytes[:, :count]
    codes = np.empty((*word_bytes.shape, 2), dtype=np.uint8)
    np.bitwise_and(word_bytes, 15, out=codes[:, :, 0])
    np.right_shift(word_bytes, 4, out=codes[:, :, 1])
    first_codes: Bytes = codes.reshape(len(words), -1)[:, :count]
    return first_codes
