"""Norms that subtract the mean of a row and have no bias (LayerNorm), from the kernels that others use.

LayerNorm of a row is the root-mean-square norm of the row less its mean. The mean is a product of the row
with a vector, so the kernels need no further operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.kernels.table import Kernels
from moesaic.models.block import DecoderBlock, GateOutput, Projections


@dataclass(frozen=True)
class Centring:
    """Subtracts the mean of each row."""

    kernels: Kernels
    mean: torch.Tensor
    """[1, h] float32: one part in h each."""
    minus: torch.Tensor
    """[h, 1] float32: -1 each."""

    @classmethod
    def build(cls, kernels: Kernels, hidden: int, device: str) -> Centring:
        mean = torch.full((1, hidden), 1.0 / hidden, dtype=torch.float32, device=device)
        return cls(kernels, mean, torch.full((hidden, 1), -1.0, dtype=torch.float32, device=device))

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, h]."""
        means = self.kernels.linear(rows, self.mean)
        return self.kernels.merge(rows, self.kernels.linear(means, self.minus), None, None)


@dataclass(frozen=True, kw_only=True)
class LayerNormBlock(DecoderBlock):
    """A decoder block whose two norms subtract the mean. Hidden states keep their mean."""

    centring: Centring

    def pre_attention(self, hidden: torch.Tensor, positions: torch.Tensor) -> Projections:
        """hidden [n, h] and positions [n] -> query, key and value of each row, after a LayerNorm."""
        return super().pre_attention(self.centring.apply(hidden), positions)

    def gate(self, hidden: torch.Tensor, partial: torch.Tensor) -> GateOutput:
        """Adds the attention output [n, h] to hidden [n, h], applies a LayerNorm, and chooses experts."""
        residual = self.kernels.merge(hidden, partial, None, None)
        normed_rows = self._normalize(residual)
        if self.router is None:
            return GateOutput(residual, normed_rows, None, None)
        return GateOutput(residual, normed_rows, *self.router.choose(normed_rows))

    def _normalize(self, residual: torch.Tensor) -> torch.Tensor:
        return super()._normalize(self.centring.apply(residual))
