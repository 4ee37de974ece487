"""The operations of `kernels.table` on the compiled module: checks the arguments, then passes addresses.

The bits of a row depend only on the row, its weights and the instruction set. They do not depend on the
other rows of its batch, on the chunks of its prefill, or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesaic.core.weight_types import NATIVE_DTYPES, expert_code, join_dtypes
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import stored_width, width_of
from moesaic.kernels.gating import Gating
from moesaic.kernels.matrix import Weight
from moesaic.kernels.native import _native, checks
from moesaic.kernels.native.memory import MEMORY
from moesaic.kernels.native.plain import numbers
from moesaic.kernels.weights import ExpertWeights


def linear(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows [n, i] times weight [o, i] transposed, plus bias [o] float32. Returns [n, o]."""
    n, k = checks.axes(rows, 2)
    rows, columns = checks.rows(rows), len(weight)
    address, dtype_code = checks.weight(weight, columns, k)
    output = MEMORY.empty(n, columns)
    _native.linear1(
        rows.data_ptr(), n, k, address, checks.exact(bias, columns), output.data_ptr(), columns, dtype_code
    )
    return output


def linears(
    rows: torch.Tensor, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Three projections of the same rows [n, i].

    They run one after another if their number is another one, or if some weights are bf16 and others not.
    """
    n, k = checks.axes(rows, 2)
    counts = [len(weight) for weight in weights]
    addressed = [checks.weight(weight, count, k) for weight, count in zip(weights, counts, strict=True)]
    # The compiled call takes three matrices, and one kind of them: all bf16, or none.
    if len(weights) != 3 or len({dtype_code == checks.NARROW for _, dtype_code in addressed}) > 1:
        return tuple(linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    rows = checks.rows(rows)
    bias_addresses = [checks.exact(bias, count) for bias, count in zip(biases, counts, strict=True)]
    outs = tuple(MEMORY.empty(n, count) for count in counts)
    _native.linear3(
        rows.data_ptr(), n, k, *[address for address, _ in addressed], *bias_addresses,
        *[output.data_ptr() for output in outs], *counts, *[dtype_code for _, dtype_code in addressed],
    )  # fmt: skip
    return outs


def head_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies each head by its own matrix: rows [n, H, i] times weight [H, i, o]. Returns [n, H, o].

    weight must be dense in i or in o.
    """
    rows = checks.heads(rows)
    n, heads, k = rows.shape
    columns = checks.axes(weight, 3)[2]
    if 1 not in weight.stride()[1:] or weight.shape[:2] != (heads, k) or weight.dtype not in checks.STORED:
        raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype} does not fit rows {tuple(rows.shape)}")
    output = MEMORY.empty(n, heads, columns)
    _native.head_linear(
        rows.data_ptr(), rows.stride(0), rows.stride(1), weight.data_ptr(), *weight.stride(),
        output.data_ptr(), n, heads, k, columns, weight.dtype is torch.float32,
    )  # fmt: skip
    return output


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides rows [..., h] by their root mean square, and multiplies by weight [h]."""
    checks.is_float(rows)
    if rows.dim() != 2 or rows.stride(1) != 1:
        rows = rows.contiguous()
    width = checks.axes(rows, rows.dim())[-1]
    checks.exact(weight, width)
    output = MEMORY.empty(*rows.shape)
    n = rows.numel() // width
    stride = rows.stride(0) if rows.dim() == 2 else width
    _native.norm(rows.data_ptr(), 0, weight.data_ptr(), 0, output.data_ptr(), n, width, stride, epsilon)
    return output


def add_norm(
    rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows + added, [n, h], and its norm."""
    n, width = checks.axes(rows, 2)
    rows, addend = checks.rows(rows), checks.rows(addend, n, width)
    checks.exact(weight, width)
    total, output = MEMORY.empty(n, width), MEMORY.empty(n, width)
    _native.norm(
        rows.data_ptr(), addend.data_ptr(), weight.data_ptr(), total.data_ptr(), output.data_ptr(),
        n, width, width, epsilon,
    )  # fmt: skip
    return total, output


def rope(
    rows: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    is_interleaved: bool = False,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Normalizes each head if `norm` [d] is given, then rotates its first pairs; see the reference."""
    rows = checks.heads(rows)
    n, heads, width = rows.shape
    if width > 1024 or width % 2:
        raise ValueError(f"heads of {width} numbers; allowed: an even number up to 1024")
    half = checks.axes(cosine, 2)[1]
    if 2 * half > width:
        raise ValueError(f"angles of {half} pairs; allowed: at most {width // 2} in heads of {width} numbers")
    angles = (len(cosine), half)
    output = MEMORY.empty(n, heads, width)
    _native.rope(
        rows.data_ptr(), rows.stride(0), rows.stride(1), checks.exact(norm, width), epsilon,
        checks.exact(cosine, *angles), checks.exact(sine, *angles),
        checks.exact(positions, n, dtype=torch.int64), output.data_ptr(), n, heads, width, 2 * half,
        is_interleaved,
    )  # fmt: skip
    return output


def gated_mlp(rows: torch.Tensor, gate_proj: Weight, up_proj: Weight, down_proj: Weight) -> torch.Tensor:
    """down(silu(gate rows) * (up rows)): rows [n, h], gate and up [w, h], down [h, w] -> [n, h].

    Gate and up have one type. That of down may differ if both are quantised.
    """
    n, hidden = checks.axes(rows, 2)
    rows, width = checks.rows(rows), len(gate_proj)
    shapes = ((gate_proj, width, hidden), (up_proj, width, hidden), (down_proj, hidden, width))
    addresses, types = zip(*(checks.weight(*checked_shape) for checked_shape in shapes), strict=True)
    if types[0] != types[1] or (types[0] != types[2] and min(types) <= checks.WIDE):
        raise TypeError("gate, up and down differ in type")
    checks.axes(down_proj, 2)
    output = MEMORY.empty(n, hidden)
    dtype_code = expert_code(join_dtypes(NATIVE_DTYPES[types[0]], NATIVE_DTYPES[types[2]]))
    _native.gated_mlp(rows.data_ptr(), *addresses, output.data_ptr(), n, hidden, width, dtype_code)
    return output


def gate(
    rows: torch.Tensor, weight: torch.Tensor, gating: Gating, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns expert ids [n, k] int64, best first (of equal ones the first), and weights [n, k]."""
    n, hidden = checks.axes(rows, 2)
    rows, count = checks.rows(rows), len(weight)
    checks.exact(weight, count, hidden)
    top_k, groups, groups_kept = gating.top_k, gating.groups, gating.groups_kept
    if groups < 1 or count % groups or not 1 <= top_k <= count // groups * min(groups_kept, groups):
        raise ValueError(f"{top_k} of {count} experts in {groups_kept} of {groups} groups cannot be chosen")
    two_best = gating.group_scores == "two best"
    if two_best and groups_kept < groups and count // groups < 2:
        raise ValueError(f"{count} experts in {groups} groups: a group lacks the two experts of its score")
    ids, weights = MEMORY.empty(n, top_k, dtype=torch.int64), MEMORY.empty(n, top_k)
    bias_address = checks.exact(bias, count)
    biases = (0, bias_address) if gating.bias_target == "products" else (bias_address, 0)
    _native.gate(
        rows.data_ptr(), weight.data_ptr(), *biases, ids.data_ptr(), weights.data_ptr(),
        n, hidden, count, top_k, groups, groups_kept, gating.scale, gating.sum_epsilon, gating.normalise,
        gating.scores == "sigmoid", two_best,
    )  # fmt: skip
    return ids, weights


def experts(
    weights: ExpertWeights,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes every (token, expert) pair. Returns rows [n, k, h] float32, not multiplied by gate weights.

    Raises KeyError for an expert that `weights` does not have.
    """
    n, width = checks.axes(hidden, 2)
    top_k = checks.axes(expert_ids, 2)[1]
    hidden, ids = checks.rows(hidden), expert_ids.contiguous()
    checks.exact(ids, n, top_k, dtype=torch.int64)
    output = MEMORY.empty(n, top_k, width) if output is None else MEMORY.keep(output)
    checks.exact(output, n, top_k, width)
    table = weights.table
    if table.hidden not in (0, width):
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit experts of hidden size {table.hidden}")
    absent = _native.experts(
        hidden.data_ptr(), ids.data_ptr(), *table.addresses, output.data_ptr(), n, top_k, width, table.width,
        weights.num_experts, table.dtype_code, *numbers(weights.activation),
    )  # fmt: skip
    if absent != _native.ALL_HELD:
        raise KeyError(f"expert {int(ids.flatten()[absent])} is not held here")
    return output


def merge(
    residual: torch.Tensor,
    dense: torch.Tensor | None,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Returns residual + dense + sum of weights * rows [n, k, h], in top-k order."""
    n, width = checks.axes(residual, 2)
    residual, dense = checks.rows(residual), None if dense is None else checks.rows(dense, n, width)
    top_k = 0
    if rows is not None and weights is not None:
        top_k = checks.axes(rows, 3)[1]
        rows, weights = checks.rows(rows, n, top_k, width), checks.rows(weights, n, top_k)
    parts = [0 if part is None else part.data_ptr() for part in (dense, rows, weights)]
    output = MEMORY.empty(n, width)
    _native.merge(residual.data_ptr(), *parts, output.data_ptr(), n, top_k, width)
    return output


def embed(table: Weight, token_ids: torch.Tensor) -> torch.Tensor:
    """Looks up rows token_ids [n] of a table [V, h]. Returns [n, h] float32."""
    n, width, (address, dtype_code) = len(token_ids), checks.axes(table, 2)[1], checks.weight(table)
    ids = checks.exact(token_ids, n, dtype=torch.int64)
    output = MEMORY.empty(n, width)
    _native.embed(address, ids, output.data_ptr(), n, width, dtype_code)
    return output


def join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Concatenates [n, H, a] and [n, H, b]. Returns [n, H, a + b]."""
    left, right = checks.heads(left), checks.heads(right)
    n, heads, width = left.shape
    checks.shape(right, n, heads, right.shape[2])
    output = MEMORY.empty(n, heads, width + right.shape[2])
    _native.join(
        left.data_ptr(), right.data_ptr(), output.data_ptr(), n, heads, width, right.shape[2],
        left.stride(0), left.stride(1), right.stride(0), right.stride(1),
    )  # fmt: skip
    return output


def sigmoid_gate(rows: torch.Tensor, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiplies values [n, w] by sigmoid(rows [n, h] times weight [1, h] transposed). Returns [n, w]."""
    n, hidden = checks.axes(rows, 2)
    width = checks.axes(values, 2)[1]
    rows, values = checks.rows(rows), checks.rows(values, n, width)
    gate = checks.exact(weight, 1, hidden)
    output = MEMORY.empty(n, width)
    _native.sigmoid_gate(rows.data_ptr(), gate, values.data_ptr(), output.data_ptr(), n, hidden, width)
    return output


def clip(rows: torch.Tensor, limit: float) -> torch.Tensor:
    """Limits every number of rows [n, w] to -limit .. limit. NaN stays NaN."""
    n, width = checks.axes(rows, 2)
    rows, output = checks.rows(rows), MEMORY.empty(n, width)
    _native.clip(rows.data_ptr(), output.data_ptr(), n, width, limit)
    return output


def mask_tokens(logits: torch.Tensor, lines: torch.Tensor, masks: torch.Tensor) -> None:
    """Sets logits [*, v] of the rows `lines` [n] int64 to -inf where a bit of masks [n, w] int32 is clear."""
    rows, width = checks.axes(logits, 2)
    n = len(lines)
    places, words = checks.exact(lines, n, dtype=torch.int64), (width + 31) // 32
    bits = checks.exact(masks, n, words, dtype=torch.int32)
    # The compiled module writes to addresses without a check of its own.
    if n and not 0 <= int(lines.min()) <= int(lines.max()) < rows:
        raise ValueError(f"lines: got {lines.tolist()}; allowed: 0 to {rows - 1}")
    _native.mask_tokens(checks.exact(logits, rows, width), places, bits, n, width)


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes rows [n, Hkv, d] to slots [n] of a cache [blocks, block_size, Hkv, stored width]."""
    heads, width = checks.axes(cache, 4)[2], width_of(cache)
    n, item = len(rows), checks.cache(cache)
    rows = checks.rows(rows, n, heads, width)
    places = checks.exact(slots, n, dtype=torch.int64)
    _native.store(rows.data_ptr(), places, cache.data_ptr(), n, heads, width, item)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    value_width: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of each row over its own sequence, up to its own position; see the reference."""
    blocks, block_size, kv_heads, _ = checks.axes(keys, 4)
    n, heads, _ = checks.axes(query, 3)
    key_width, item = width_of(keys), checks.cache(keys)
    query = checks.rows(query, batch.batch.num_rows, heads, key_width)
    # Values at the address of the keys are a part of them. int8 rows cannot be: each has its own scale.
    if values is not None and values.data_ptr() == keys.data_ptr() and item > 1:
        value_width = values.shape[-1] if value_width is None else value_width
        values = None
    width = value_width if value_width is not None else width_of(keys if values is None else values)
    if heads % kv_heads or block_size != batch.block_size or (values is None and width > key_width):
        raise ValueError(f"query {tuple(query.shape)} and keys {tuple(keys.shape)} do not fit")
    if values is not None:
        values_shape = (blocks, block_size, kv_heads, stored_width(width, keys.dtype))
        if checks.cache(values, *values_shape) != item:
            raise TypeError("keys and values differ in type")
    output = MEMORY.empty(n, heads, width)
    _native.attention(
        query.data_ptr(), keys.data_ptr(), 0 if values is None else values.data_ptr(),
        checks.exact(sinks, heads), *batch.addresses, output.data_ptr(), n, *batch.sizes, heads, kv_heads,
        key_width, width, sliding_window or 0, scale, item,
    )  # fmt: skip
    return output
