"""Measures the flops/s of the engine's own matrix products, by dtype of the weights and rows for each
matrix.

Two shapes are measured. Routed experts of a layer are grouped: each has the same number of rows, and each
row has several experts. Projections are single matrices, one after another. There are so many matrices that
products with few rows do not find them in a cache.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from moesaic.core.weight_types import (
    BLOCK_TYPES,
    COMPRESSED_DTYPE,
    INTEGER_GROUP_TYPES,
    NVFP4_TYPES,
    QUANTIZATIONS,
    is_packed,
    row_bytes,
    split_dtype,
)
from moesaic.kernels.blocks import OFFSET_GROUP, SCALES
from moesaic.kernels.compressed_layout import compress
from moesaic.kernels.quantized_layout import pack
from moesaic.kernels.small_blocks import write_scattered_half
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.planning.hardware.timing import Show, Stopwatch

Shape = Literal["experts", "dense"]
WEIGHTS = 16 * 3 * 2048 * 768
"""Number of weights of all experts together."""
MIN_MATRICES, MAX_MATRICES = 2, 64
"""Minimum and maximum number of matrices, whatever their size."""
SHAPES: tuple[Shape, ...] = ("experts", "dense")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the products to measure."""

    hidden: int = 2048
    width: int = 768
    """Width of an expert."""
    matrices: int = 16
    """Number of experts, and of projections."""
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 512, 2048)
    """Numbers of rows for each matrix that are measured."""
    most_rows: int = 2048
    """Maximum number of rows of a pass. With many rows for each matrix, fewer matrices are used."""
    top_k: int = 8
    """Number of experts of a row. Their answers are stored separately. With many rows these exceed the
    caches."""
    packed_type: str | None = None
    """A type of core.weight_types.PACKED_DTYPES that is measured, if the kernels compute from it: compressed
    experts in place of those in bf16, quantised ones beside the others."""

    def with_experts(self, hidden: int, width: int, top_k: int, packed_type: str | None = None) -> Sizes:
        """The same sizes with a model's own experts, in such a number that no cache can hold them."""
        matrices = min(max(math.ceil(WEIGHTS / (3 * hidden * width)), MIN_MATRICES), MAX_MATRICES)
        return replace(
            self, hidden=hidden, width=width, top_k=top_k, matrices=matrices, packed_type=packed_type
        )

    def with_matrix_bytes(self, size: int, number: int) -> Sizes:
        """The same sizes with so many matrices that each shape takes `size` bytes.

        number: bytes of one weight.

        Example: 16 matrices of 2048 x 2048 in bf16 are 128 MiB. 64 of them take 512 MiB.
        """
        least = number * self.hidden * min(self.hidden, 3 * self.width)
        return replace(self, matrices=max(self.matrices, math.ceil(size / least)))

    def count_matrices(self, shape: Shape, rows: int) -> int:
        """Number of matrices that are multiplied with `rows` rows each.

        Example: 16 projections of 64 rows, 4 of 512, one of 2048; 16 experts of 512 rows, 8 of 2048.
        """
        pairs = self.most_rows * (self.top_k if shape == "experts" else 1)
        return max(1, min(self.matrices, pairs // rows))


@dataclass(frozen=True)
class Rate:
    """The measured speed of one product."""

    shape: Shape
    dtype: str
    """Type of the weights, a name of core/weight_types.py. Rows are float32."""
    rows: int
    """Number of rows that each matrix is multiplied with."""
    flops: float
    """Measured flops/s."""


def measure_rates(
    kernels: Kernels,
    dtypes: Sequence[torch.dtype],
    sizes: Sizes,
    stopwatch: Stopwatch,
    show: Show,
    device: str = "cpu",
    min_bytes: int = 0,
) -> tuple[Rate, ...]:
    """Measure every combination of dtype, shape and rows. min_bytes: minimum bytes of a shape's matrices."""
    measured_rates: list[Rate] = []
    packed_type = sizes.packed_type
    if packed_type is not None and (packed_type == COMPRESSED_DTYPE or not _can_read(kernels, packed_type)):
        packed_type = None
    total = (len(dtypes) * len(SHAPES) + (packed_type is not None)) * len(sizes.rows)
    jobs = [
        (dtype_name(dtype), _jobs(kernels, dtype, sizes.with_matrix_bytes(min_bytes, dtype.itemsize), device))
        for dtype in dtypes
    ]
    if packed_type is not None:
        jobs.append(
            (
                packed_type,
                _expert_jobs(
                    kernels, torch.float32, sizes.with_matrix_bytes(min_bytes, 1), device, packed_type
                ),
            )
        )
    for name, dtype_jobs in jobs:
        for shape, rows, flops, run in dtype_jobs:
            show(f"products on {device}", len(measured_rates), total)
            measured_rates.append(Rate(shape, name, rows, flops / stopwatch.seconds(run)))
    show(f"products on {device}", total, total)
    return tuple(measured_rates)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def find_peak(rates: Sequence[Rate], dtype: str) -> float:
    """Flops/s of the fastest product with weights of `dtype`."""
    return max(rate.flops for rate in rates if rate.dtype == dtype)


def prefill_efficiency(rates: Sequence[Rate], dtype: str) -> float:
    """Share of the peak that long products reach: those with the most rows, with equal flops for each
    shape.

    Example: with 2048 rows, experts reach 75 Gflops/s and projections 100. Together that is 85.7. The peak
    is 100, so the share is 0.857.
    """
    longest = max(rate.rows for rate in rates)
    long_rates = [rate.flops for rate in rates if rate.rows == longest and rate.dtype == dtype]
    return statistics.harmonic_mean(long_rates) / find_peak(rates, dtype)


def flops_by_rows(rates: Sequence[Rate], dtype: str) -> tuple[tuple[float, float], ...]:
    """(rows for each expert, flops/s) of the routed experts with weights of `dtype`, fewest rows first."""
    expert_rates = [rate for rate in rates if rate.shape == "experts" and rate.dtype == dtype]
    return tuple(sorted((float(rate.rows), rate.flops) for rate in expert_rates))


def compute_overlap(rates: Sequence[Rate], dtype: str, bandwidth: float) -> float:
    """How much reading weights and computing overlap, 0 to 1.

    It is the share of the shorter one that runs during the longer one, derived from the times of products
    with few rows. bandwidth: bytes/s at which weights are read.

    Example: weights have 2 bytes, are read at 1 byte/s, and the peak is 2 flops/s. With 2 rows, reading a
    weight takes 2 s, and so does computing. 4 s in all mean an overlap of 0; 3 s mean 0.5.
    """
    top, size = find_peak(rates, dtype), getattr(torch, dtype).itemsize
    exposed_share = shorter = 0.0
    for rate in rates:
        if rate.dtype == dtype:
            took, times = 2 * rate.rows / rate.flops, (2 * rate.rows / top, size / bandwidth)
            exposed_share += min(times) * (took - max(times)) / took**2
            shorter += (min(times) / took) ** 2
    return min(max(1 - exposed_share / shorter, 0.0), 1.0)


def _can_read(kernels: Kernels, packed_type: str) -> bool:
    """Whether kernels compute from a quantised type."""
    return is_packed(packed_type) and kernels.choose_quantized_type(packed_type) == packed_type


Job = tuple[Shape, int, float, Callable[[], object]]
"""The shape, rows and flops of a product, and the function that computes it."""


def _jobs(kernels: Kernels, dtype: torch.dtype, sizes: Sizes, device: str) -> Iterator[Job]:
    hidden, is_compressed = sizes.hidden, sizes.packed_type == COMPRESSED_DTYPE and kernels.can_use_compressed
    is_compressed = is_compressed and dtype is torch.bfloat16
    stored_type = COMPRESSED_DTYPE if is_compressed else dtype_name(dtype)
    yield from _expert_jobs(kernels, dtype, sizes, device, stored_type)
    matrices = [random((hidden, hidden), dtype, device) for _ in range(sizes.matrices)]
    for rows in sizes.rows:
        num_matrices, states = (
            sizes.count_matrices("dense", rows),
            random((rows, hidden), torch.float32, device),
        )
        yield (
            *("dense", rows, 2.0 * num_matrices * rows * hidden * hidden),
            partial(_multiply_all, kernels, states, matrices[:num_matrices]),
        )


def _expert_jobs(
    kernels: Kernels, dtype: torch.dtype, sizes: Sizes, device: str, stored_type: str
) -> Iterator[Job]:
    hidden, width = sizes.hidden, sizes.width
    weights = _experts(sizes, dtype, device, stored_type)
    for rows in sizes.rows:
        ids = _ids(sizes.count_matrices("experts", rows), rows, sizes.top_k).to(device)
        states = random((len(ids), hidden), torch.float32, device)
        answers = torch.empty((*ids.shape, hidden), device=device)
        yield (
            *("experts", rows, 6.0 * ids.numel() * hidden * width),
            partial(kernels.experts, weights, states, ids, answers),
        )


def _ids(experts: int, rows: int, top_k: int) -> torch.Tensor:
    """[n, k] expert ids of rows with `top_k` experts each, so that each expert has `rows` rows.

    If that is not possible, some experts have one more row. Example: 4 experts of 3 rows each, 2 experts a
    row: 0 1, 2 3, 0 1, ...
    """
    experts_per_row = min(top_k, experts)
    pairs = math.ceil(experts * rows / experts_per_row) * experts_per_row
    return (torch.arange(pairs) % experts).view(-1, experts_per_row)


def _multiply_all(kernels: Kernels, states: torch.Tensor, matrices: Sequence[torch.Tensor]) -> None:
    for matrix in matrices:
        kernels.linear(states, matrix)


def _experts(sizes: Sizes, dtype: torch.dtype, device: str, stored_type: str) -> ExpertWeights:
    """stored_type: that of the experts; where it is one of numbers, it is `dtype`."""
    inner_type, down_type = split_dtype(stored_type)

    def part(kind: str, *shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            random_in_type(kind, (shape[0], shape[1])) if is_packed(kind) else random(shape, dtype, device)
            for _ in range(sizes.matrices)
        )

    hidden, width = sizes.hidden, sizes.width
    inner_parts = part(inner_type, width, hidden), part(inner_type, width, hidden)
    packed_dtype = stored_type if is_packed(stored_type) else COMPRESSED_DTYPE
    return ExpertWeights(*inner_parts, part(down_type, hidden, width), packed_dtype=packed_dtype)


def _compress(matrix: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(compress(matrix.view(torch.uint16).numpy()))


def random_in_type(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """A matrix of random numbers in a type of `core.weight_types.NATIVE_DTYPES`."""
    if kind in BLOCK_TYPES:
        return _random_blocks(kind, shape)
    if kind in QUANTIZATIONS:
        return _quantize_random(kind, shape)
    if kind == COMPRESSED_DTYPE:
        return _compress(random(shape, torch.bfloat16, "cpu"))
    return random(shape, getattr(torch, kind), "cpu")


def _quantize_random(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix of random numbers in a quantised type."""
    quantized_format, (rows, columns) = QUANTIZATIONS[kind], shape
    codes = torch.randint(
        0x7F if quantized_format.bits == 8 else 16, (rows, columns), dtype=torch.uint8
    ).numpy()
    scales = random((rows, -(-columns // quantized_format.group)), torch.float32, "cpu").numpy()
    return torch.from_numpy(pack(kind, codes, scales, -scales if quantized_format.offset else None))


def _random_blocks(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """A matrix of random codes in blocks, with small scales."""
    rows, columns = shape
    stored_rows = torch.randint(256, (rows, row_bytes(kind, columns)), dtype=torch.uint8)
    blocks = stored_rows.view(-1, BLOCK_TYPES[kind].size)
    if kind == OFFSET_GROUP or kind in NVFP4_TYPES:
        scales = random((len(blocks), 1), torch.float32, "cpu").view(torch.uint8)
        blocks[:, 1:5] = scales
        if kind in NVFP4_TYPES:  # then scales in E4M3 that are no NaN
            blocks[:, :4] = scales
            blocks[:, 4:] &= 0x77
        return stored_rows
    if kind not in SCALES:  # an exponent of one byte, with 127 for 1
        blocks[:, 0] = 122
        return stored_rows
    if kind in INTEGER_GROUP_TYPES:  # a zero point of 8, and a scale in float16
        blocks[:, 0] = 8
    halves = random((len(blocks), len(SCALES[kind])), torch.float32, "cpu").half()
    if kind == "iq1_m":
        write_scattered_half(blocks.numpy(), halves.numpy())
        return stored_rows
    scales = halves.view(torch.uint8)
    for index, offset in enumerate(SCALES[kind]):
        blocks[:, offset : offset + 2] = scales[:, 2 * index : 2 * index + 2]
    return stored_rows


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random numbers. A GPU draws less power on constants and runs faster, so constants would flatter it."""
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-0.05, 0.05)
