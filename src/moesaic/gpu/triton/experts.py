"""The routed experts in three launches: pairs are grouped, then two grouped products run over the groups.

Nothing is read back: the host knows neither how many rows an expert has nor which experts have any. Each
product's grid has room for the most tiles that the pairs can need, and programs beyond the last tile end at
once. So experts without rows cost nothing: the "group-shrink" of Expert-as-a-Service. Weights are read
through a table of pointers, so they may lie anywhere that the device can read. An expert with an address of 0
costs nothing either: with a table that changes (`ExpertWeights.page_table`) each layer has what is there now.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.gpu.triton.product import product
from moesaic.gpu.triton.weights import address, step_of, weight_tile
from moesaic.kernels.weights import DeviceTable, ExpertWeights

TILE_ROWS = 16
"""Rows of a tile where experts have few."""
MANY_ROWS = 64
"""Rows of a tile from MANY_ROWS pairs an expert on."""
TILE_COLUMNS = 64
SCAN, FEW_PAIRS = 1024, 64
"""Pairs that a program of `_group` reads at a time, and where there are not more of them. Other numbers would
be compiled anew."""


@triton.jit
def _count(ids, counts, pairs, SCAN: tl.constexpr):
    """counts[e]: the pairs of expert e. One program an expert, no atomics."""
    expert, count = tl.program_id(0), 0
    for begin in range(0, pairs, SCAN):
        offsets = begin + tl.arange(0, SCAN)
        count += tl.sum((tl.load(ids + offsets, mask=offsets < pairs, other=-1) == expert).to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit
def _group(
    ids,
    counts,
    order,
    tiles,
    pairs,
    experts,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write each expert's pairs to `order`, in turn, and (expert, begin, end) in `order` to `tiles`."""
    expert = tl.program_id(0)
    expert_ids = tl.arange(0, EXPERTS)
    precedes = expert_ids < expert
    all_counts = tl.load(counts + expert_ids, mask=expert_ids < experts, other=0)
    begin = tl.sum(tl.where(precedes, all_counts, 0), 0)
    first_tile = tl.sum(tl.where(precedes, (all_counts + ROWS - 1) // ROWS, 0), 0)
    end = begin + tl.sum(tl.where(expert_ids == expert, all_counts, 0), 0)
    for tile in range((end - begin + ROWS - 1) // ROWS):
        entry = tiles + (first_tile + tile) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, begin + tile * ROWS)
        tl.store(entry + 2, tl.minimum(end, begin + (tile + 1) * ROWS))
    place = begin
    for scan_begin in range(0, pairs, SCAN):
        offsets = scan_begin + tl.arange(0, SCAN)
        matches = (tl.load(ids + offsets, mask=offsets < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(matches, 0) - matches, offsets, mask=matches > 0)
        place += tl.sum(matches, 0)


@triton.jit
def _gate_and_up(
    hidden,
    pointers,
    order,
    tiles,
    wide,
    experts,
    width,
    size,
    line,
    alpha,
    up_offset,
    limit,
    K: tl.constexpr,
    KIND: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """wide [pairs, width] in the order of `order`: the activation of gate and up."""
    tile = tiles + tl.program_id(0) * 3
    expert, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    gate_address, up_address = tl.load(pointers + expert), tl.load(pointers + experts + expert)
    if (begin < end) & (gate_address != 0):
        lines = begin + tl.arange(0, ROWS)
        source = tl.load(order + lines, mask=lines < end, other=0) // K
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        gate_pointer, up_pointer = address(gate_address, IS_ALIGNED), address(up_address, IS_ALIGNED)
        gate_product = tl.zeros([ROWS, COLUMNS], tl.float32)
        up_product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(0, size, STEP):
            inner = step + tl.arange(0, STEP)
            mask = (lines < end)[:, None] & (inner < size)[None, :]
            read = hidden + source[:, None].to(tl.int64) * size + inner[None, :]
            rows = tl.load(read, mask=mask, other=0.0)
            gate_tile = weight_tile(gate_pointer, columns, width, step, size, line, KIND, STEP)
            up_tile = weight_tile(up_pointer, columns, width, step, size, line, KIND, STEP)
            gate_product = product(rows, gate_tile, gate_product)
            up_product = product(rows, up_tile, up_product)
        if HAS_BIAS:
            of_gates = tl.load(pointers + 3 * experts + expert).to(tl.pointer_type(tl.float32))
            of_ups = tl.load(pointers + 4 * experts + expert).to(tl.pointer_type(tl.float32))
            gate_product += tl.load(of_gates + columns, mask=columns < width, other=0.0)[None, :]
            up_product += tl.load(of_ups + columns, mask=columns < width, other=0.0)[None, :]
        if HAS_LIMIT:
            gate_product = tl.where(gate_product > limit, limit, gate_product)
            up_product = tl.where(
                up_product > limit, limit, tl.where(up_product < -limit, -limit, up_product)
            )
        activations = (up_product + up_offset) * gate_product * tl.sigmoid(alpha * gate_product)
        output_pointers = wide + lines[:, None].to(tl.int64) * width + columns[None, :]
        tl.store(output_pointers, activations, mask=(lines < end)[:, None] & (columns < width)[None, :])


@triton.jit
def _down_projection(
    wide,
    pointers,
    order,
    tiles,
    out,
    experts,
    width,
    size,
    line,
    KIND: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SKIPS_ABSENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """out [pairs, size] in the order of the pairs. Of an expert that is not held it is NaN, or spared."""
    tile = tiles + tl.program_id(0) * 3
    expert, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if begin < end:
        lines = begin + tl.arange(0, ROWS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        down_address = tl.load(pointers + 2 * experts + expert)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        is_resident, first = down_address != 0, address(down_address, IS_ALIGNED)
        for step in range(0, tl.where(is_resident, width, 0), STEP):
            inner = step + tl.arange(0, STEP)
            mask = (lines < end)[:, None] & (inner < width)[None, :]
            read = wide + lines[:, None].to(tl.int64) * width + inner[None, :]
            rows = tl.load(read, mask=mask, other=0.0)
            down_tile = weight_tile(first, columns, size, step, width, line, KIND, STEP)
            total = product(rows, down_tile, total)
        if HAS_BIAS:
            biases = tl.load(pointers + 5 * experts + expert).to(tl.pointer_type(tl.float32))
            total += tl.load(biases + columns, mask=columns < tl.where(is_resident, size, 0), other=0.0)[
                None, :
            ]
        total = tl.where(is_resident, total, float("nan"))
        pair = tl.load(order + lines, mask=lines < end, other=0)
        output_pointers = out + pair[:, None].to(tl.int64) * size + columns[None, :]
        valid_columns = columns < (tl.where(is_resident, size, 0) if SKIPS_ABSENT else size)
        tl.store(output_pointers, total, mask=(lines < end)[:, None] & valid_columns[None, :])


def experts(
    weights: ExpertWeights,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes what `reference.experts.experts` does, but raises nothing for an absent expert: its rows of
    `output` stay as they are, for whoever computes them. Without `output` they are NaN, since nobody looks.
    """
    tokens, top_k = expert_ids.shape
    hidden, table = hidden.contiguous(), weights.on_device
    pairs, size, width = tokens * top_k, table.hidden, table.width
    rows = hidden.new_empty(pairs, size) if output is None else output.flatten(0, 1)
    if pairs:
        order, tiles, tile_rows = group_pairs(expert_ids.reshape(-1), weights.num_experts)
        wide = _wide(weights, table, hidden, order, tiles, top_k, tile_rows)
        common = {"HAS_BIAS": bool(weights.gate_bias), "ROWS": tile_rows, "COLUMNS": TILE_COLUMNS}
        lines = (weights.num_experts, width, size, table.down_line)
        grid = len(tiles), triton.cdiv(size, TILE_COLUMNS)
        launch(
            _down_projection,
            grid,
            wide,
            table.addresses,
            order,
            tiles,
            rows,
            *lines,
            KIND=table.kinds[1],
            IS_ALIGNED=table.is_aligned,
            SKIPS_ABSENT=output is not None,
            STEP=step_of(table.kinds[1]),
            **common,
        )
    return rows.view(tokens, top_k, size)


def _wide(
    weights: ExpertWeights,
    table: DeviceTable,
    hidden: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    top_k: int,
    tile_rows: int,
) -> torch.Tensor:
    """[pairs, w] the activated products of gate and up, in the order of `order`."""
    activation, width = weights.activation, table.width
    wide = hidden.new_empty(len(order), width)
    limit = 0.0 if activation.limit is None else activation.limit
    launch(
        _gate_and_up,
        (len(tiles), triton.cdiv(width, TILE_COLUMNS)),
        hidden,
        table.addresses,
        order,
        tiles,
        wide,
        weights.num_experts,
        width,
        table.hidden,
        table.gate_line,
        activation.alpha,
        activation.up_offset,
        limit,
        K=top_k,
        KIND=table.kinds[0],
        IS_ALIGNED=table.is_aligned,
        HAS_BIAS=bool(weights.gate_bias),
        HAS_LIMIT=activation.limit is not None,
        ROWS=tile_rows,
        COLUMNS=TILE_COLUMNS,
        STEP=step_of(table.kinds[0]),
    )
    return wide


def group_pairs(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The pairs of `ids` [p] by expert, without reading anything back.

    Returns order [p] int32: the pairs of expert 0, then those of expert 1, and so on, each in order; tiles
    [t, 3] int32: (expert, begin, end) in `order`, with begin = end = 0 for those that are not used; and the
    most rows of a tile.
    """
    pairs = len(ids)
    rows = MANY_ROWS if pairs >= MANY_ROWS * experts else TILE_ROWS
    max_tiles = pairs // rows + min(experts, pairs)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.zeros(max_tiles, 3, dtype=torch.int32, device=ids.device)
    scan = FEW_PAIRS if pairs <= FEW_PAIRS else SCAN
    launch(_count, (experts,), ids, counts, pairs, SCAN=scan)
    constants = {"ROWS": rows, "SCAN": scan, "EXPERTS": block(experts)}
    launch(_group, (experts,), ids, counts, order, tiles, pairs, experts, **constants)
    return order, tiles, rows
