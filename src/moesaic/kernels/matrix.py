"""Quantised matrices outside of the routed experts: attention, dense layers, shared experts, the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moesaic.core.weight_types import row_bytes
from moesaic.kernels.quantized import dequantize


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [o, i] that stays in the type in which it is stored."""

    stored: torch.Tensor
    """[o, row_bytes] uint8, in the layout of `csrc/quantized.h`."""
    columns: int
    """i"""
    kind: str
    """Its type: a key of `core.stored.QUANTIZED`."""

    def __post_init__(self) -> None:
        wanted = len(self.stored), row_bytes(self.kind, self.columns)
        if self.stored.dtype is not torch.uint8 or self.stored.shape != wanted:
            got = f"{self.stored.dtype} {tuple(self.stored.shape)}"
            raise TypeError(f"a matrix in {self.kind}: got {got}; allowed: torch.uint8 {wanted}")

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def shape(self) -> torch.Size:
        """[o, i]"""
        return torch.Size((len(self.stored), self.columns))

    @property
    def device(self) -> torch.device:
        return self.stored.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.stored.nbytes

    def numel(self) -> int:
        """Number of its numbers."""
        return len(self.stored) * self.columns

    def data_ptr(self) -> int:
        """Address of its first byte."""
        return self.stored.data_ptr()

    def floats(self) -> torch.Tensor:
        """The numbers [o, i] in float32."""
        if self.stored.is_meta:
            return torch.empty(self.shape, device="meta")
        return torch.from_numpy(dequantize(self.kind, self.stored.numpy(), self.columns))

    def rows(self, kept: torch.Tensor) -> QuantizedMatrix:
        """The rows `kept` [n] int64."""
        return QuantizedMatrix(self.stored[kept], self.columns, self.kind)


Weight = torch.Tensor | QuantizedMatrix
"""A matrix that kernels multiply by."""


def plain(weight: Weight) -> torch.Tensor:
    """The numbers of a matrix. Quantised ones become float32."""
    return weight.floats() if isinstance(weight, QuantizedMatrix) else weight


def number_of(weight: Weight) -> torch.dtype:
    """The type of a matrix's numbers: float32 if it is quantised."""
    return torch.float32 if isinstance(weight, QuantizedMatrix) else weight.dtype


def kind_of(weight: Weight) -> str:
    """The type of a matrix in memory, a name of `core.stored`."""
    return weight.kind if isinstance(weight, QuantizedMatrix) else str(weight.dtype).removeprefix("torch.")


def rows_of(weight: Weight, kept: torch.Tensor) -> Weight:
    """The rows `kept` [n] int64 of a matrix, dense."""
    return weight.rows(kept) if isinstance(weight, QuantizedMatrix) else weight[kept]


def joined(parts: Sequence[Weight]) -> Weight:
    """One matrix of the rows of several. If their types differ, it is float32."""
    first = parts[0]
    if isinstance(first, QuantizedMatrix):
        alike = [one.stored for one in parts if isinstance(one, QuantizedMatrix) and one.kind == first.kind]
        if len(alike) == len(parts):
            return QuantizedMatrix(torch.cat(alike), first.columns, first.kind)
    return torch.cat(of_one_type([plain(one) for one in parts]))


def of_one_type(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same matrices. If their types differ, all are float32."""
    return list(parts) if len({one.dtype for one in parts}) == 1 else [one.float() for one in parts]
