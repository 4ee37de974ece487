"""Turns numbers into codes: by rounding to nearest, and by GPTQ.

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.jobs.quantizing.formats import Format, QuantizedMatrix, round_scales

DAMPING = (0.01, 0.1, 1.0)
"""What is added to the diagonal of a Hessian, as a share of its mean. The next one is tried if a Hessian is
singular in float32."""
SHARES = tuple(1 - step / 40 for step in range(21))
"""Shares of the largest number that a scale may cover: the best one is taken."""
BAND = 1 << 20
"""Numbers that are rounded to nearest at a time, so that little memory is taken."""
BLOCK_COLUMNS = 128
"""Columns whose errors are spread to all later columns together, if a row has no groups."""


@dataclass(frozen=True)
class Rounding:
    """Rounds matrices to a format, with scales of a type of files."""

    format: Format
    scales: str
    """Type of the scales, as safetensors calls it."""

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """Round each number of a matrix [rows, columns] float32 to the nearest code.

        Scales cover all numbers.
        """
        rows, columns = weight.shape
        codes = torch.empty(rows, columns, dtype=torch.uint8)
        scales = torch.empty(rows, self.format.groups(columns))
        step = max(1, BAND // columns)
        for begin in range(0, rows, step):
            band = slice(begin, begin + step)
            groups = weight[band].view(-1, scales.shape[1], columns // scales.shape[1])
            scales[band] = self._cover(groups.abs().amax(2))
            codes[band] = self._codes(groups, scales[band, :, None]).flatten(1)
        return QuantizedMatrix(codes.numpy(), scales.numpy())

    def gptq(self, weight: torch.Tensor, hessian: torch.Tensor) -> QuantizedMatrix | None:
        """Round column after column. Later columns of a row make up for the errors of earlier ones.

        weight: [rows, columns] float32. hessian: [columns, columns] float32, the sum of x x^T over the
        inputs x. Returns None for a Hessian that has no inverse although it is damped.
        """
        factor = _inverse_factor(hessian)
        if factor is None:
            return None
        remaining = weight.clone()
        importance = hessian.diagonal()
        columns = weight.shape[1]
        size = self.format.group or columns
        step = self.format.group or BLOCK_COLUMNS
        codes = torch.empty_like(remaining)
        scales = torch.empty(len(remaining), self.format.groups(columns))
        for begin in range(0, columns, step):
            end = min(begin + step, columns)
            if begin % size == 0:
                group = slice(begin, begin + size)
                scales[:, begin // size] = self._search_scales(remaining[:, group], importance[group])
            scale = scales[:, begin // size]
            part, upper = remaining[:, begin:end], factor[begin:end, begin:end]
            # Columns after the block get its errors in one product, which is faster than column by column.
            errors = torch.empty_like(part)
            for column in range(end - begin):
                code = self._codes(part[:, column], scale)
                codes[:, begin + column] = code
                error = (part[:, column] - (code - self._zero) * scale) / upper[column, column]
                part[:, column:] -= torch.outer(error, upper[column, column:])
                errors[:, column] = error
            remaining[:, end:] -= errors @ factor[begin:end, end:]
        return QuantizedMatrix(codes.to(torch.uint8).numpy(), scales.numpy())

    def nearest_or_gptq(self, weight: torch.Tensor, hessian: torch.Tensor | None) -> QuantizedMatrix:
        """Round by a Hessian. Without one, or if it has no inverse, round to nearest."""
        matrix = None if hessian is None else self.gptq(weight, hessian)
        return self.nearest(weight) if matrix is None else matrix

    def numbers(self, matrix: QuantizedMatrix) -> torch.Tensor:
        """The numbers [rows, columns] float32 of a quantised matrix."""
        scales = torch.from_numpy(matrix.scales)
        groups = torch.from_numpy(matrix.codes).float().view(*scales.shape, -1)
        return ((groups - self._zero) * scales[:, :, None]).flatten(1)

    @property
    def _zero(self) -> int:
        """The code of the number 0."""
        return 1 << (self.format.bits - 1)

    def _cover(self, largest: torch.Tensor) -> torch.Tensor:
        """The scales with which numbers up to `largest` have codes."""
        # A number half a step beyond the largest code still rounds to it.
        scales = largest / (self._zero - 0.5)
        return torch.from_numpy(round_scales(scales.numpy(), self.scales))

    def _search_scales(self, group: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """The scale [rows] of a group [rows, columns] with the least error.

        importance: [columns], weights of the squared errors. Large numbers may be cut off.
        """
        largest = group.abs().amax(1)
        best, least = torch.empty_like(largest), torch.full_like(largest, torch.inf)
        for share in SHARES:
            scales = self._cover(largest * share)
            codes = self._codes(group, scales[:, None])
            error = ((codes - self._zero) * scales[:, None] - group).square() @ importance
            better = error < least
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
        return best

    def _codes(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (numbers / scales).round_().add_(self._zero).clamp_(0, 2 * self._zero - 1)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor | None:
    """The upper triangle U with U^T U = the inverse of the damped Hessian; None if it has no inverse."""
    mean = hessian.diagonal().mean()
    for share in DAMPING:
        damped_hessian = hessian + torch.diag(torch.full_like(hessian.diagonal(), float(share * mean)))
        lower, error_code = torch.linalg.cholesky_ex(damped_hessian)
        if not error_code:
            factor: torch.Tensor
            factor, error_code = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not error_code:
                return factor
    return None
