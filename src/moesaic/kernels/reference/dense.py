"""Projections, norms, rotary embedding, the gated MLP and the write to a cache, in float32.

Weights stored in a narrower type are multiplied in that type. Quantised ones become float32 at each use,
which is slow. Results are always float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from moesaic.kernels.matrix import QuantizedMatrix, Weight, dequantize_weight
from moesaic.kernels.reference.cache import encode

FEW_ROWS = 5
"""Maximum number of rows (above one) for which large weights are read faster as the left operand, since MKL
packs the right one. Measured on AVX2 with float32: 1.3 to 3 times faster at 2 to 5 rows, slower from 8
on."""
LARGE_WEIGHT = 1 << 16
"""Number of elements of a weight that no longer fits the nearest caches."""


def linear(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows [n, i] times weight [o, i] transposed, plus bias [o]. Returns [n, o]."""
    answer = product(rows, dequantize_weight(weight)).float()
    return answer if bias is None else answer + bias


def linears(
    rows: torch.Tensor, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Several projections of the same rows [n, i]. Returns one [n, o] for each."""
    return tuple(linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def head_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies each head by its own matrix: rows [n, H, i] times weight [H, i, o]. Returns [n, H, o]."""
    return torch.matmul(rows.to(weight.dtype).transpose(0, 1), weight).transpose(0, 1).float()


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides rows [..., h] by their root mean square, and multiplies by weight [h]."""
    # No temporary as large as `rows`: from 2,000 rows on, its page faults cost more than the arithmetic.
    length: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    scale = length.square_().div_(rows.shape[-1]).add_(epsilon).rsqrt_()
    return (rows * scale).mul_(weight)


def add_norm(
    rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows + added, [n, h], and its `rms_norm`."""
    total = rows + addend
    return total, rms_norm(total, weight, epsilon)


def rope(
    rows: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    is_interleaved: bool = False,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Rotates each pair of rows [n, H, d] by its angle at positions [n], after a norm of each head if given.

    cosine and sine: [positions, r / 2], the whole tables. norm: [d]. Only the first r numbers of a head are
    rotated, which may be all. A pair is (i, i + r / 2), the half-split form of GPT-NeoX. Interleaved, it is
    (2i, 2i + 1) as in RoFormer. The result keeps the input's layout.
    """
    if norm is not None:
        rows = rms_norm(rows, norm, epsilon)
    rows, plain_numbers = rows.tensor_split([2 * cosine.shape[1]], dim=-1)
    cosine, sine = cosine[positions, None], sine[positions, None]
    if is_interleaved:
        first, second = rows[..., 0::2], rows[..., 1::2]
    else:
        first, second = rows.chunk(2, dim=-1)
    rotated_halves = (first * cosine - second * sine, second * cosine + first * sine)
    answer = (
        torch.stack(rotated_halves, dim=-1).flatten(-2)
        if is_interleaved
        else torch.cat(rotated_halves, dim=-1)
    )
    return torch.cat((answer, plain_numbers), dim=-1) if plain_numbers.shape[-1] else answer


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes rows [n, Hkv, d] to slots [n] (block * block_size + offset) of a cache.

    The cache is [blocks, block_size, Hkv, stored width], in any float type or int8.
    """
    cache.flatten(0, 1).index_copy_(0, slots, encode(rows, cache.dtype))


def embed(table: Weight, token_ids: torch.Tensor) -> torch.Tensor:
    """Looks up rows token_ids [n] of a table [V, h]. Returns [n, h] float32."""
    if isinstance(table, QuantizedMatrix):
        return table.select_rows(token_ids).floats()
    return functional.embedding(token_ids, table).float()


def join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Concatenates [n, H, a] and [n, H, b]. Returns [n, H, a + b]."""
    return torch.cat((left, right), dim=-1)


def sigmoid_gate(rows: torch.Tensor, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiplies values [n, w] by sigmoid(rows [n, h] times weight [1, h] transposed). Returns [n, w]."""
    return values * torch.sigmoid(linear(rows, weight))


def clip(rows: torch.Tensor, limit: float) -> torch.Tensor:
    """Limits every number of rows [n, w] to -limit .. limit. NaN stays NaN."""
    return rows.clamp(-limit, limit)


def mask_tokens(logits: torch.Tensor, lines: torch.Tensor, masks: torch.Tensor) -> None:
    """Sets logits of tokens that a mask forbids to -infinity, in place.

    logits: [*, v]. lines: [n] int64, the rows to change. masks: [n, (v + 31) // 32] int32 with a bit for each
    token, 1 where it is allowed. Token t is bit t % 32 of word t // 32.
    """
    masks, lines = masks.to(logits.device), lines.to(logits.device)
    bits = masks[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[lines] = logits[lines].masked_fill(forbidden, -torch.inf)


def gated_mlp(rows: torch.Tensor, gate_proj: Weight, up_proj: Weight, down_proj: Weight) -> torch.Tensor:
    """down(silu(gate rows) * (up rows)): rows [n, h], gate and up [w, h], down [h, w] -> [n, h]."""
    wide = functional.silu(linear(rows, gate_proj), inplace=True).mul_(linear(rows, up_proj))
    return linear(wide, down_proj)


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [n, i] times weight [o, i] transposed: [n, o], in the weight's type."""
    rows = rows.to(weight.dtype)
    few = 1 < len(rows) <= FEW_ROWS and weight.numel() >= LARGE_WEIGHT
    if few and weight.device.type == "cpu":
        return torch.mm(weight, rows.contiguous().t()).t().contiguous()
    return functional.linear(rows, weight)
