"""The operations of `kernels.table` on the compiled module: checks what it is given, then passes addresses.

Bits of a row depend on nothing but the row, its weights and the instruction set: neither on the rows that
share its batch, nor on the chunking of its prefill, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.native import _native
from moesaic.kernels.native.memory import MEMORY
from moesaic.kernels.weights import ExpertWeights

STORED = frozenset({torch.float32, torch.bfloat16})
"""Types that weights and caches may be stored in. Arithmetic is float32."""


def _rows(rows: torch.Tensor) -> torch.Tensor:
    """float32 and dense. Raises TypeError for another type."""
    if rows.dtype is not torch.float32:
        raise TypeError(f"rows: got {rows.dtype}; allowed: float32")
    return rows if rows.is_contiguous() else rows.contiguous()


def _wide(stored: torch.Tensor) -> bool:
    """Whether `stored` is float32, else bf16. Raises TypeError for another type or one that is not dense."""
    if stored.dtype is torch.bfloat16 or stored.dtype is torch.float32:
        if stored.is_contiguous():
            return stored.dtype is torch.float32
        raise TypeError("a weight is not dense")
    raise TypeError(f"weights: got {stored.dtype}; allowed: float32, bfloat16")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _same_width(rows: torch.Tensor, weight: torch.Tensor) -> None:
    if rows.shape[-1] != weight.shape[-1]:
        raise ValueError(f"shapes {tuple(rows.shape)} and {tuple(weight.shape)} do not fit")


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows [n, i] times weight [o, i] transposed, plus bias [o] float32: [n, o]."""
    _same_width(rows, weight)
    rows = _rows(rows)
    n, k = rows.shape
    out = MEMORY.empty(n, weight.shape[0])
    _native.linear1(
        rows.data_ptr(), n, k, weight.data_ptr(), _address(bias), out.data_ptr(), len(weight), _wide(weight)
    )
    return out


def linears(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Three projections of the same rows [n, i]; for any other number, one after another."""
    kinds = {_wide(weight) for weight in weights}
    if len(weights) != 3 or len(kinds) > 1:
        return tuple(linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    rows = _rows(rows)
    n, k = rows.shape
    for weight in weights:
        _same_width(rows, weight)
    counts = [len(weight) for weight in weights]
    outs = tuple(MEMORY.empty(n, count) for count in counts)
    _native.linear3(
        rows.data_ptr(), n, k, *[weight.data_ptr() for weight in weights], *map(_address, biases),
        *[out.data_ptr() for out in outs], *counts, kinds == {True},
    )  # fmt: skip
    return outs


def head_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A matrix per head: rows [n, H, i] times weight [H, i, o], dense in i or in o: [n, H, o]."""
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    n, heads, k = rows.shape
    columns = weight.shape[2]
    if 1 not in weight.stride()[1:] or weight.shape[:2] != (heads, k) or weight.dtype not in STORED:
        raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype} does not fit rows {tuple(rows.shape)}")
    out = MEMORY.empty(n, heads, columns)
    _native.head_linear(
        rows.data_ptr(), rows.stride(0), rows.stride(1), weight.data_ptr(), *weight.stride(), out.data_ptr(),
        n, heads, k, columns, weight.dtype is torch.float32,
    )  # fmt: skip
    return out


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """rows [..., h] over their root mean square, times weight [h]."""
    _same_width(rows, weight)
    if rows.dim() != 2 or rows.stride(1) != 1:
        rows = rows.contiguous()
    width = rows.shape[-1]
    out = MEMORY.empty(*rows.shape)
    n = rows.numel() // width
    stride = rows.stride(0) if rows.dim() == 2 else width
    _native.norm(rows.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), n, width, stride, epsilon)
    return out


def add_norm(
    rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows + added, [n, h], and its norm."""
    _same_width(rows, weight)
    rows, added = _rows(rows), _rows(added)
    n, width = rows.shape
    total, out = MEMORY.empty(n, width), MEMORY.empty(n, width)
    _native.norm(
        rows.data_ptr(), added.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(),
        n, width, width, epsilon,
    )  # fmt: skip
    return total, out


def rope(
    rows: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Norms each head when `norm` [d] is given, then rotates its pairs; see the reference."""
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    n, heads, width = rows.shape
    if width > 1024 or 2 * cosine.shape[1] != width:
        raise ValueError(f"heads of {width} numbers and {cosine.shape[1]} angles do not fit")
    out = MEMORY.empty(n, heads, width)
    _native.rope(
        rows.data_ptr(), rows.stride(0), rows.stride(1), _address(norm), epsilon, cosine.data_ptr(),
        sine.data_ptr(), positions.data_ptr(), out.data_ptr(), n, heads, width, interleaved,
    )  # fmt: skip
    return out


def gated_mlp(rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate rows) * (up rows)): rows [n, h], gate and up [w, h], down [h, w] -> [n, h]."""
    _same_width(rows, gate)
    rows = _rows(rows)
    n, hidden = rows.shape
    wide = _wide(gate)
    if _wide(up) != wide or _wide(down) != wide:
        raise TypeError("gate, up and down differ in type")
    out = MEMORY.empty(n, hidden)
    _native.gated_mlp(
        rows.data_ptr(), gate.data_ptr(), up.data_ptr(), down.data_ptr(), out.data_ptr(),
        n, hidden, len(gate), wide,
    )  # fmt: skip
    return out


def gate(
    rows: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    normalise: bool,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [n, k] int64, best first (of equal ones the first), and weights [n, k]."""
    _same_width(rows, weight)
    rows = _rows(rows)
    if not _wide(weight):
        raise TypeError("the weight of a gate is float32")
    n, hidden = rows.shape
    ids, weights = MEMORY.empty(n, top_k, dtype=torch.int64), MEMORY.empty(n, top_k)
    _native.gate(
        rows.data_ptr(), weight.data_ptr(), ids.data_ptr(), weights.data_ptr(), n, hidden, len(weight), top_k,
        groups, groups_kept, scale, normalise,
    )  # fmt: skip
    return ids, weights


def experts(
    weights: ExpertWeights,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every (token, expert) pair through its expert: rows [n, k, h] float32, unweighted.

    Raises KeyError for an expert that `weights` does not hold.
    """
    hidden, ids = _rows(hidden), expert_ids.contiguous()
    n, width = hidden.shape
    top_k = ids.shape[1]
    out = MEMORY.empty(n, top_k, width) if out is None else MEMORY.keep(out)
    table = weights.table
    if table.hidden not in (0, width) or out.shape != (n, top_k, width) or not out.is_contiguous():
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit experts of hidden size {table.hidden}")
    absent = _native.experts(
        hidden.data_ptr(), ids.data_ptr(), *table.addresses, out.data_ptr(), n, top_k, width, table.width,
        weights.num_experts, table.wide,
    )  # fmt: skip
    if absent != _native.ALL_HELD:
        raise KeyError(f"expert {int(ids.flatten()[absent])} is not held here")
    return out


def merge(
    residual: torch.Tensor,
    dense: torch.Tensor | None,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """residual + dense + sum of weights * rows [n, k, h], in the order of the top-k ranks."""
    residual, dense = _rows(residual), None if dense is None else _rows(dense)
    n, width = residual.shape
    top_k = 0
    if rows is not None and weights is not None:
        rows, weights = _rows(rows), _rows(weights)
        top_k = rows.shape[1]
    out = MEMORY.empty(n, width)
    _native.merge(
        residual.data_ptr(),
        _address(dense),
        _address(rows),
        _address(weights),
        out.data_ptr(),
        n,
        top_k,
        width,
    )
    return out


def embed(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows token_ids [n] of a table [V, h]: [n, h] float32."""
    n, width = token_ids.numel(), table.shape[1]
    out = MEMORY.empty(n, width)
    _native.embed(table.data_ptr(), token_ids.data_ptr(), out.data_ptr(), n, width, _wide(table))
    return out


def join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n, H, a] and [n, H, b] side by side: [n, H, a + b]."""
    if left.stride(2) != 1 or right.stride(2) != 1:
        left, right = left.contiguous(), right.contiguous()
    n, heads, width = left.shape
    out = MEMORY.empty(n, heads, width + right.shape[2])
    _native.join(
        left.data_ptr(), right.data_ptr(), out.data_ptr(), n, heads, width, right.shape[2],
        left.stride(0), left.stride(1), right.stride(0), right.stride(1),
    )  # fmt: skip
    return out


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows [n, Hkv, d] into slots [n] of a cache [blocks, block_size, Hkv, d]."""
    rows = _rows(rows)
    n = len(rows)
    if rows.shape[1:] != cache.shape[2:]:
        raise ValueError(f"rows {tuple(rows.shape)} do not fit the cache {tuple(cache.shape)}")
    width = rows.numel() // n if n else 0
    _native.store(rows.data_ptr(), slots.data_ptr(), cache.data_ptr(), n, width, _wide(cache))


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    value_width: int | None = None,
) -> torch.Tensor:
    """Softmax attention of each row over its own sequence, up to its own position; see the reference."""
    query = _rows(query)
    n, heads, key_width = query.shape
    kv_heads = keys.shape[2]
    wide = _wide(keys)
    in_keys = values is None or values.data_ptr() == keys.data_ptr()
    if values is not None and not in_keys and _wide(values) != wide:
        raise TypeError("keys and values differ in type")
    width = value_width if value_width is not None else (keys if values is None else values).shape[-1]
    out = MEMORY.empty(n, heads, width)
    _native.attention(
        query.data_ptr(), keys.data_ptr(), 0 if in_keys else _address(values), *batch.addresses,
        out.data_ptr(), n, *batch.sizes, heads, kv_heads, key_width, width, sliding_window or 0, scale, wide,
    )  # fmt: skip
    return out
