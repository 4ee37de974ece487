"""Quantised matrices outside of the routed experts: attention, dense layers, shared experts, the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moesaic.core.weight_types import BLOCK_TYPES, row_bytes
from moesaic.kernels import blocks
from moesaic.kernels.quantized_layout import dequantize


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [o, i] that stays in the type in which it is stored."""

    stored_rows: torch.Tensor
    """[o, row_bytes] uint8, in the layout of `csrc/quantized.h` or of a GGUF file's blocks."""
    columns: int
    """i"""
    kind: str
    """The type of the matrix, for which `core.weight_types.is_quantized` holds."""

    def __post_init__(self) -> None:
        expected_shape = len(self.stored_rows), row_bytes(self.kind, self.columns)
        if self.stored_rows.dtype is not torch.uint8 or self.stored_rows.shape != expected_shape:
            got = f"{self.stored_rows.dtype} {tuple(self.stored_rows.shape)}"
            raise TypeError(f"a matrix in {self.kind}: got {got}; allowed: torch.uint8 {expected_shape}")

    def __len__(self) -> int:
        return len(self.stored_rows)

    @property
    def shape(self) -> torch.Size:
        """[o, i]"""
        return torch.Size((len(self.stored_rows), self.columns))

    @property
    def device(self) -> torch.device:
        return self.stored_rows.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.stored_rows.nbytes

    def numel(self) -> int:
        """Number of elements, as of a tensor."""
        return len(self.stored_rows) * self.columns

    def data_ptr(self) -> int:
        """Address of its first byte."""
        return self.stored_rows.data_ptr()

    def floats(self) -> torch.Tensor:
        """The numbers [o, i] in float32."""
        # A model is also built from tensors without memory, to check shapes or to count bytes.
        if self.stored_rows.is_meta:
            return torch.empty(self.shape, device="meta")
        stored_rows = self.stored_rows.numpy()
        if self.kind in BLOCK_TYPES:
            return torch.from_numpy(blocks.dequantize(self.kind, stored_rows))
        return torch.from_numpy(dequantize(self.kind, stored_rows, self.columns))

    def select_rows(self, indices: torch.Tensor) -> QuantizedMatrix:
        """The rows `indices` [n] int64."""
        return QuantizedMatrix(self.stored_rows[indices], self.columns, self.kind)


Weight = torch.Tensor | QuantizedMatrix
"""A matrix that kernels multiply by."""


def dequantize_weight(weight: Weight) -> torch.Tensor:
    """The numbers of a matrix. Quantised ones become float32."""
    return weight.floats() if isinstance(weight, QuantizedMatrix) else weight


def number_dtype(weight: Weight) -> torch.dtype:
    """The type of a matrix's numbers: float32 if it is quantised."""
    return torch.float32 if isinstance(weight, QuantizedMatrix) else weight.dtype


def kind_of(weight: Weight) -> str:
    """The type of a matrix in memory, a name of `core.weight_types`."""
    return weight.kind if isinstance(weight, QuantizedMatrix) else str(weight.dtype).removeprefix("torch.")


def select_rows(weight: Weight, indices: torch.Tensor) -> Weight:
    """The rows `indices` [n] int64 of a matrix, dense."""
    return weight.select_rows(indices) if isinstance(weight, QuantizedMatrix) else weight[indices]


def concat_rows(parts: Sequence[Weight]) -> Weight:
    """Returns one matrix of the rows of several. If their types differ, it is float32."""
    first = parts[0]
    if isinstance(first, QuantizedMatrix):
        alike = [
            part.stored_rows
            for part in parts
            if isinstance(part, QuantizedMatrix) and part.kind == first.kind
        ]
        if len(alike) == len(parts):
            return QuantizedMatrix(torch.cat(alike), first.columns, first.kind)
    return torch.cat(unify_dtypes([dequantize_weight(part) for part in parts]))


def unify_dtypes(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same matrices. If their types differ, all are float32."""
    return list(parts) if len({part.dtype for part in parts}) == 1 else [part.float() for part in parts]
