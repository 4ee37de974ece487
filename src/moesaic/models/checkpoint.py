"""Memory-mapped safetensors checkpoints. The name and shape of every tensor is checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.core.errors import CheckpointError
from moesaic.core.weight_types import BLOCK_TYPES, COMPRESSED_DTYPE, row_bytes
from moesaic.kernels.compressed_layout import decompress
from moesaic.models import fused_tensors
from moesaic.models.columns import transpose
from moesaic.models.config import shorten
from moesaic.models.files import INDEX as INDEX
from moesaic.models.files import SINGLE as SINGLE
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.gguf.header import is_gguf
from moesaic.models.gguf.model import Model
from moesaic.models.headers import COMPRESSED_ROWS
from moesaic.models.pages import PAGE, align_size, drop_pages, huge_pages
from moesaic.models.quantization.parse import find, read_skipped_patterns, scheme_of
from moesaic.models.quantization.scheme import Array, Matrix, Part, as_array
from moesaic.models.tensor_files import Slice, TensorFile, open_tensor_file, shards
from moesaic.models.wrapped_names import IN_WRAPPED, file_prefix, plain_names

Progress = Callable[[int, int], None]
"""Called with bytes read so far, and total bytes of all files."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, COMPRESSED_ROWS: torch.uint8}
NUMBERS_AT_A_TIME = 1 << 18
"""Numbers that are looked at together, so that they stay in the cache of the CPU."""
_INFINITY = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""Data type -> integers of its width, and the bits of infinity."""
BYTES_AT_A_TIME = 64 << 20
"""Bytes that are mapped at a time. Pages that are not written use no memory."""


class Checkpoint:
    """The tensors of one directory or GGUF file. Each is read only when it is needed.

    Raises CheckpointError, in one line, for a directory without safetensors, and for a file that is truncated
    or corrupt. It also raises it for a tensor that is missing, or whose shape or type the model does not
    expect.
    """

    def __init__(self, path: Path, progress: Progress | None = None, use_mmap: bool = True) -> None:
        """use_mmap: False copies tensors into memory, so that the files' pages can be dropped."""
        self.path = path
        self._copies = None if use_mmap else Copies()
        self._progress = progress
        self._bytes_read = 0
        self._files: dict[Path, TensorFile] = {}
        self._shard = shards(path)
        self._claimed_names: set[str] = set()
        self._scheme = scheme_of(path)
        self.skipped_patterns = read_skipped_patterns(path)
        """Patterns of the names of tensors about activations and the KV cache, which are not read."""
        for shard in sorted(set(self._shard.values())):
            shard_names = set(self._open(shard).keys())
            listed_names = {name for name, file in self._shard.items() if file == shard}
            for name in sorted(listed_names - shard_names):
                problem = f"tensor {shorten(name)} is missing, though the index lists it"
                raise CheckpointError(f"{shard}: {problem}")
        # A model that sees images has its text model under other names. All code here uses the text model's.
        file_names = plain_names(self._shard)
        self._shard = {name: self._shard[file_name] for name, file_name in file_names.items()}
        self._file_names = file_names
        self.is_wrapped = any(
            name != file_name and file_name.startswith(IN_WRAPPED) for name, file_name in file_names.items()
        )
        """Whether these are files of a larger model with a text model in it."""
        self._bytes = sum(shard.stat().st_size for shard in self._files)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the checkpoint. Those of a text model in a larger model are its own."""
        return frozenset(self._shard)

    def find_quantized(self, name: str, *shape: int) -> Matrix | None:
        """The tensor `name` [rows, columns] as a quantised matrix; None if the files have it as it is."""
        return find(self._scheme, name, shape, self._kind)

    def claim(self, name: str, *shape: int) -> None:
        """Marks a tensor as part of the model, without reading it. Checks its name, shape and type.

        A matrix of an expert may be a part of a larger tensor (fused.py). A quantised matrix has several.
        """
        matrix = self.find_quantized(name, *shape)
        if matrix is not None:
            for part in matrix.parts:
                self._check(part)
                self._claimed_names.add(part.tensor)
            return
        tensor_slice = self._slice(name)
        if tensor_slice.get_dtype() not in BLOCKS or len(shape) < 3:  # else quantised matrices of all experts
            self.dtype(name)
        fused_part = self.find_fused_part(name)
        if fused_part is not None:
            experts = fused_part.experts(tensor_slice.get_shape(), shape[0])
            name, shape = fused_part.tensor, fused_part.tensor_shape(experts, *shape)
        if tensor_slice.get_dtype() == COMPRESSED_ROWS:
            if len(shape) != 2:
                raise CheckpointError(f"{self.path}: tensor {name}: got dtype U8; allowed: only for matrices")
            shape = shape[0], row_bytes(COMPRESSED_DTYPE, shape[1])
        if tuple(tensor_slice.get_shape()) != shape:
            got = list(tensor_slice.get_shape())
            raise CheckpointError(f"{self.path}: tensor {name}: got shape {got}; allowed: {list(shape)}")
        self._claimed_names.add(name)

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype,
        device: str = "cpu",
        part: tuple[slice, ...] = (),
        scan: bool = True,
        is_transposed: bool = False,
        packed_dtype: str | None = None,
    ) -> torch.Tensor:
        """Returns a tensor of exactly this shape, or the `part` of it that these slices select.

        It is memory-mapped if it is stored as `dtype` and wanted on the CPU, unless columns are selected or
        it is transposed to [columns, rows] of the part. A compressed or quantised tensor stays so if dtype is
        uint8. Then it cannot be transposed, and a part must be one for which `Matrix.cuts` holds.
        scan: raise CheckpointError for a number that is NaN or infinite, also one that only `dtype` makes so.
        packed_dtype: the type of a quantised tensor that stays so: that of its Matrix, or its `conversion`.
        """
        self.claim(name, *shape)
        matrix = self.find_quantized(name, *shape)
        if matrix is not None:
            return self._read_matrix(matrix, dtype, device, part, scan, packed_dtype)
        mapped = self._read_whole(name, shape)
        if dtype is torch.uint8 is not mapped.dtype:
            self._refuse_numbers(name)
        if mapped.dtype is torch.uint8 is not dtype:
            bits = torch.from_numpy(decompress(mapped.numpy(), shape[1])).view(torch.bfloat16)
            part_bits = bits[part].clone(memory_format=torch.contiguous_format) if part else bits
            tensor = part_bits.to(device=device, dtype=dtype)
        else:
            whole_tensor = mapped
            mapped = _copy_transposed(mapped[part]) if is_transposed else mapped[part].contiguous()
            tensor = mapped.to(device=device, dtype=dtype)
            if is_transposed:  # the copy stands for these pages
                drop_pages(whole_tensor.data_ptr(), whole_tensor.nbytes)
        if tensor.data_ptr() == mapped.data_ptr():
            if self._copies is None:
                _page_in(mapped)
            else:
                tensor = self._copies.copy(mapped)
        if scan and tensor.dtype is not torch.uint8:
            self._refuse_not_finite(name, tensor)
        if self._copies is not None:  # kernels read the copy, so the file's pages need no memory
            drop_pages(mapped.data_ptr(), mapped.nbytes)
        if self._progress is not None:
            self._bytes_read += mapped.nbytes
            self._progress(self._bytes_read, self._bytes)
        return tensor

    def _refuse_numbers(self, name: str) -> None:
        kind = self._slice(name).get_dtype()
        raise CheckpointError(f"{self.path}: tensor {name}: got dtype {kind}; allowed: U8, as other experts")

    def _read_matrix(
        self,
        matrix: Matrix,
        dtype: torch.dtype,
        device: str,
        part: tuple[slice, ...],
        scan: bool,
        packed_dtype: str | None,
    ) -> torch.Tensor:
        """The numbers of a part of a quantised matrix, or the bytes that kernels read if dtype is uint8.

        These are mapped if the file has them in this order.
        """
        file_parts: list[torch.Tensor] = []

        def array(part: Part) -> Array:
            file_tensor = self._read(part.tensor)
            raw = file_tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            index = part.index[0] if part.index else None
            file_parts.append(file_tensor[index] if isinstance(index, int) else file_tensor)
            shape = tuple(self._slice(part.tensor).get_shape())
            return as_array(raw, str(self._kind(part.tensor)), part, shape)

        try:
            if dtype is torch.uint8:
                stored_rows = matrix.pack_rows(array, part=part, dtype=packed_dtype)
                if scan and matrix.dtype in BLOCK_TYPES and packed_dtype in (None, matrix.dtype):
                    matrix.check_blocks(stored_rows)
                numbers = torch.from_numpy(stored_rows)
            else:
                numbers = torch.from_numpy(matrix.floats(array)[part])
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        tensor = numbers.to(device=device, dtype=dtype).contiguous()
        is_mapped = _is_part_of(file_parts, tensor)
        if is_mapped and self._copies is not None:
            tensor = self._copies.copy(tensor)
        elif is_mapped:
            _page_in(tensor)
        if self._copies is not None or not is_mapped:  # the copy stands for these pages
            for file_part in file_parts:
                drop_pages(file_part.data_ptr(), file_part.nbytes)
        if self._progress is not None:
            self._bytes_read += sum(file_part.nbytes for file_part in file_parts)
            self._progress(self._bytes_read, self._bytes)
        if scan and dtype not in (torch.uint8, torch.float32):  # others have fewer exponents
            self._refuse_not_finite(f"{matrix.name}.weight", tensor)
        return tensor

    def _kind(self, name: str) -> str | None:
        """The type of a tensor in the files; None if they do not have it."""
        return str(self._slice(name).get_dtype()) if name in self._shard else None

    def _check(self, part: Part) -> None:
        """Raises CheckpointError unless the files have a part of a quantised matrix."""
        kind = self._kind(part.tensor)
        try:
            part.check(kind, () if kind is None else tuple(self._slice(part.tensor).get_shape()))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def number(self, name: str) -> torch.dtype:
        """The type of numbers that matrices have in the files: that of tensor `name`, the embedding.

        In GGUF files, where types differ more, it is the one that holds the numbers of all of them.
        """
        return DTYPES[Model(self.path).numbers] if is_gguf(self.path) else self.dtype(name)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type in which a tensor is stored. Checks its name and type."""
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            allowed_types = ", ".join(DTYPES)
            raise CheckpointError(f"{self.path}: tensor {name}: got dtype {kind}; allowed: {allowed_types}")
        return DTYPES[kind]

    def find_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor in the files; None if they do not have it, or are not here."""
        return tuple(self._slice(name).get_shape()) if name in self._shard else None

    def find_fused_part(self, name: str) -> fused_tensors.FusedPart | None:
        """Where in a fused tensor a matrix of an expert is; None for a tensor of its own."""
        return fused_tensors.find_fused_part(name, self._shard.__contains__)

    def file_prefix(self, prefix: str, name: str, *shape: int) -> str:
        """Returns what files have for `prefix`, with which `name`, a tensor or expert's matrix, begins."""
        fused_part, matrix = self.find_fused_part(name), self.find_quantized(name, *shape)
        plain = name if fused_part is None else fused_part.tensor
        plain = plain if matrix is None else matrix.parts[0].tensor
        return file_prefix(prefix, plain, self._file_names[plain])

    def equal(self, name: str, other_name: str) -> bool:
        """Whether two tensors are equal. The pages read for the comparison are dropped."""
        tensors = [self._read(tensor_name) for tensor_name in (name, other_name)]
        is_equal = torch.equal(*tensors)
        for tensor in tensors:
            drop_pages(tensor.data_ptr(), tensor.nbytes)
        return is_equal

    def unread(self, unused_patterns: tuple[str, ...] = ()) -> list[str]:
        """Returns tensors that were not claimed and that match none of the regular expressions
        `unused_patterns`."""
        unread_names, unused_patterns = (
            sorted(self.names - self._claimed_names),
            (*unused_patterns, *self.skipped_patterns),
        )
        return [
            name
            for name in unread_names
            if not any(re.fullmatch(pattern, name) for pattern in unused_patterns)
        ]

    def refuse_unread(self, unused_patterns: tuple[str, ...] = ()) -> None:
        """Raises CheckpointError naming the first tensor that the model did not expect."""
        unread_names = self.unread(unused_patterns)
        if unread_names:
            remainder = f" (and {len(unread_names) - 1} more)" if len(unread_names) > 1 else ""
            raise CheckpointError(
                f"{self.path}: tensor {shorten(unread_names[0])} is not expected by this model{remainder}"
            )

    def read_raw(self, name: str) -> torch.Tensor:
        """Returns a tensor of the files as it is stored, without any check of its shape."""
        self.dtype(name)
        return self._read(name)

    def _refuse_not_finite(self, name: str, tensor: torch.Tensor) -> None:
        index = first_not_finite(tensor)
        if index is not None:
            coordinates = [int(coordinate) for coordinate in np.unravel_index(index, tensor.shape)]
            number, kind = float(tensor.view(-1)[index]), str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.path}: tensor {name}: got {number} at {coordinates} as {kind}; "
                "allowed: finite numbers"
            )

    def _read_whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole tensor, mapped."""
        fused_part = self.find_fused_part(name)
        if fused_part is None:
            return self._read(name)
        return self._read(fused_part.tensor)[fused_part.index(shape[0])]

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open(self._shard[name]).get_tensor(self._file_names[name])
        return tensor

    def _slice(self, name: str) -> Slice:
        fused_part = self.find_fused_part(name)
        name = name if fused_part is None else fused_part.tensor
        if name not in self._shard:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._open(self._shard[name]).get_slice(self._file_names[name])

    def _open(self, shard: Path) -> TensorFile:
        if shard not in self._files:
            self._files[shard] = open_tensor_file(self.path, shard, huge=self._copies is None)
        return self._files[shard]


class Claims(Checkpoint):
    """A checkpoint whose tensors are claimed and never read: a config that does not fit costs no memory."""

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype,
        device: str = "cpu",
        part: tuple[slice, ...] = (),
        scan: bool = True,
        is_transposed: bool = False,
        packed_dtype: str | None = None,
    ) -> torch.Tensor:
        """Claims a tensor, and returns one of its shape without memory."""
        self.claim(name, *shape)
        selection = torch.empty(shape, dtype=dtype, device="meta")[part]
        matrix = self.find_quantized(name, *shape) if dtype is torch.uint8 else None
        if matrix is not None:
            rows, columns = selection.shape
            size = row_bytes(packed_dtype or matrix.dtype, columns)
            return torch.empty(rows, size, dtype=dtype, device="meta")
        return selection.t() if is_transposed else selection


class Partial(Claims):
    """A checkpoint of which only some tensors are read. The others are tensors without memory."""

    def __init__(self, path: Path, is_wanted: Callable[[str], bool]) -> None:
        """is_wanted: whether to read a tensor, by its name."""
        super().__init__(path)
        self._is_wanted = is_wanted

    def tensor(self, name: str, *shape: int, **options: Any) -> torch.Tensor:
        """Reads a tensor that is wanted, as `Checkpoint.tensor` does. Others are without memory."""
        return (Checkpoint if self._is_wanted(name) else Claims).tensor(self, name, *shape, **options)


class IndexClaims(Claims):
    """The tensors that an index lists, for a checkpoint whose weights are elsewhere. Only names are checked.

    Raises CheckpointError for a file that is no index, and for a tensor that it does not list.
    """

    def __init__(self, path: Path) -> None:
        """path: the directory of the index."""
        self.path = path
        self._shard = shards(path)
        self._claimed_names = set()
        self._scheme, self.skipped_patterns = None, ()  # the types of tensors are not known

    def find_shape(self, name: str) -> None:
        """No shape is known."""

    def claim(self, name: str, *shape: int) -> None:
        """Marks a tensor as part of the model. Only its name is checked."""
        fused_part = self.find_fused_part(name)
        name = name if fused_part is None else fused_part.tensor
        if name not in self._shard:
            raise CheckpointError(f"{self.path / INDEX}: tensor {name} is missing")
        self._claimed_names.add(name)


def _copy_transposed(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a dense copy."""
    copy = matrix.new_empty(matrix.shape[::-1])
    transpose(matrix, copy)
    return copy


def _is_part_of(file_parts: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of one of these."""
    return any(
        file_part.data_ptr() <= tensor.data_ptr() < file_part.data_ptr() + file_part.nbytes
        for file_part in file_parts
    )


def _page_in(tensor: torch.Tensor) -> None:
    """Reads every page of a mapped tensor, so that the first requests do not wait for page faults."""
    tensor.view(-1).view(torch.uint8)[::PAGE].sum()


def first_not_finite(tensor: torch.Tensor) -> int | None:
    """Returns the index in row-major order of the first NaN or infinite number, or None.

    An exponent whose bits are all set means that a number is NaN or infinite. So the bits without the sign
    are compared as integers, which takes one pass and no conversion.

    >>> first_not_finite(torch.tensor([[0.0, 1.0], [float("nan"), -float("inf")]]))
    2
    """
    if tensor.device.type != "cpu":
        if torch.isfinite(tensor.sum(dtype=torch.float32)):
            return None
        broken = torch.nonzero(~torch.isfinite(tensor).view(-1))[:1].tolist()
        return int(broken[0][0]) if broken else None
    kind, infinity = _INFINITY[tensor.dtype]
    bits = tensor.contiguous().view(-1).view(kind).numpy()
    memory = np.empty(min(NUMBERS_AT_A_TIME, len(bits)), bits.dtype)
    for begin in range(0, len(bits), NUMBERS_AT_A_TIME):
        part = bits[begin : begin + NUMBERS_AT_A_TIME]
        without_sign = np.bitwise_and(part, np.iinfo(bits.dtype).max, out=memory[: len(part)])
        if without_sign.max() >= infinity:
            return begin + int(np.argmax(without_sign >= infinity))
    return None


class Copies:
    """Copies of tensors in this process's own memory, one after the other.

    Their memory stays allocated while any of them exists.

    >>> copies = Copies()
    >>> one, other = copies.copy(torch.ones(3)), copies.copy(torch.zeros(5))
    >>> one.tolist(), other.data_ptr() - one.data_ptr()
    ([1.0, 1.0, 1.0], 64)
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a dense copy of the same shape."""
        size = align_size(tensor.nbytes)
        if size > len(self._free):
            self._free = torch.frombuffer(huge_pages(max(size, BYTES_AT_A_TIME)), dtype=torch.uint8)
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)
