"""The routed experts in three launches: pairs are grouped, then two grouped products run over the groups.

Nothing is read back: the host knows neither how many rows an expert has nor which experts have any. Each
product's grid has room for the most tiles that the pairs can need, and programs beyond the last tile end at
once. So experts without rows cost nothing: the "group-shrink" of Expert-as-a-Service. Weights are read
through a table of pointers, so they may lie anywhere that the device can read. An expert with an address of 0
costs nothing either: with a table that changes (`ExpertWeights.pages`) each layer has what is there now.
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
SCAN, FEW = 1024, 64
"""Pairs that a program of `_group` reads at a time, and where there are not more of them. Other numbers would
be compiled anew."""


@triton.jit
def _count(ids, counts, pairs, SCAN: tl.constexpr):
    """counts[e]: the pairs of expert e. One program an expert, no atomics."""
    expert, found = tl.program_id(0), 0
    for begin in range(0, pairs, SCAN):
        at = begin + tl.arange(0, SCAN)
        found += tl.sum((tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32), 0)
    tl.store(counts + expert, found)


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
    every = tl.arange(0, EXPERTS)
    before = every < expert
    all_counts = tl.load(counts + every, mask=every < experts, other=0)
    begin = tl.sum(tl.where(before, all_counts, 0), 0)
    first_tile = tl.sum(tl.where(before, (all_counts + ROWS - 1) // ROWS, 0), 0)
    end = begin + tl.sum(tl.where(every == expert, all_counts, 0), 0)
    for tile in range((end - begin + ROWS - 1) // ROWS):
        at = tiles + (first_tile + tile) * 3
        tl.store(at, expert)
        tl.store(at + 1, begin + tile * ROWS)
        tl.store(at + 2, tl.minimum(end, begin + (tile + 1) * ROWS))
    place = begin
    for scanned in range(0, pairs, SCAN):
        at = scanned + tl.arange(0, SCAN)
        mine = (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - mine, at, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit
def _gated(
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
    added,
    limit,
    K: tl.constexpr,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIASED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """wide [pairs, width] in the order of `order`: the activation of gate and up."""
    tile = tiles + tl.program_id(0) * 3
    expert, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    gate_at, up_at = tl.load(pointers + expert), tl.load(pointers + experts + expert)
    if (begin < end) & (gate_at != 0):
        lines = begin + tl.arange(0, ROWS)
        source = tl.load(order + lines, mask=lines < end, other=0) // K
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        of_gate_at, of_up_at = address(gate_at, ALIGNED), address(up_at, ALIGNED)
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(0, size, STEP):
            inner = step + tl.arange(0, STEP)
            inside = (lines < end)[:, None] & (inner < size)[None, :]
            read = hidden + source[:, None].to(tl.int64) * size + inner[None, :]
            rows = tl.load(read, mask=inside, other=0.0)
            of_gate = weight_tile(of_gate_at, columns, width, step, size, line, KIND, STEP)
            of_up = weight_tile(of_up_at, columns, width, step, size, line, KIND, STEP)
            gate = product(rows, of_gate, gate)
            up = product(rows, of_up, up)
        if BIASED:
            of_gates = tl.load(pointers + 3 * experts + expert).to(tl.pointer_type(tl.float32))
            of_ups = tl.load(pointers + 4 * experts + expert).to(tl.pointer_type(tl.float32))
            gate += tl.load(of_gates + columns, mask=columns < width, other=0.0)[None, :]
            up += tl.load(of_ups + columns, mask=columns < width, other=0.0)[None, :]
        if LIMITED:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        activated = (up + added) * gate * tl.sigmoid(alpha * gate)
        to = wide + lines[:, None].to(tl.int64) * width + columns[None, :]
        tl.store(to, activated, mask=(lines < end)[:, None] & (columns < width)[None, :])


@triton.jit
def _down(
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
    ALIGNED: tl.constexpr,
    BIASED: tl.constexpr,
    SPARED: tl.constexpr,
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
        down_at = tl.load(pointers + 2 * experts + expert)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        held, first = down_at != 0, address(down_at, ALIGNED)
        for step in range(0, tl.where(held, width, 0), STEP):
            inner = step + tl.arange(0, STEP)
            inside = (lines < end)[:, None] & (inner < width)[None, :]
            read = wide + lines[:, None].to(tl.int64) * width + inner[None, :]
            rows = tl.load(read, mask=inside, other=0.0)
            of_down = weight_tile(first, columns, size, step, width, line, KIND, STEP)
            total = product(rows, of_down, total)
        if BIASED:
            biases = tl.load(pointers + 5 * experts + expert).to(tl.pointer_type(tl.float32))
            total += tl.load(biases + columns, mask=columns < tl.where(held, size, 0), other=0.0)[None, :]
        total = tl.where(held, total, float("nan"))
        pair = tl.load(order + lines, mask=lines < end, other=0)
        to = out + pair[:, None].to(tl.int64) * size + columns[None, :]
        written = columns < (tl.where(held, size, 0) if SPARED else size)
        tl.store(to, total, mask=(lines < end)[:, None] & written[None, :])


def experts(
    weights: ExpertWeights,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.experts.experts`. But nothing is raised for an expert that is not held: its rows of
    `output` stay as they are, for whoever computes them. Without `output` they are NaN, since nobody looks.
    """
    tokens, top_k = expert_ids.shape
    hidden, table = hidden.contiguous(), weights.on_device
    pairs, size, width = tokens * top_k, table.hidden, table.width
    rows = hidden.new_empty(pairs, size) if output is None else output.flatten(0, 1)
    if pairs:
        order, tiles, tile_rows = grouped(expert_ids.reshape(-1), weights.num_experts)
        wide = _wide(weights, table, hidden, order, tiles, top_k, tile_rows)
        common = {"BIASED": bool(weights.gate_bias), "ROWS": tile_rows, "COLUMNS": TILE_COLUMNS}
        lines = (weights.num_experts, width, size, table.down_line)
        grid = len(tiles), triton.cdiv(size, TILE_COLUMNS)
        launch(
            _down,
            grid,
            wide,
            table.addresses,
            order,
            tiles,
            rows,
            *lines,
            KIND=table.kinds[1],
            ALIGNED=table.is_aligned,
            SPARED=output is not None,
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
        _gated,
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
        ALIGNED=table.is_aligned,
        BIASED=bool(weights.gate_bias),
        LIMITED=activation.limit is not None,
        ROWS=tile_rows,
        COLUMNS=TILE_COLUMNS,
        STEP=step_of(table.kinds[0]),
    )
    return wide


def grouped(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The pairs of `ids` [p] by expert, without reading anything back.

    Returns order [p] int32: the pairs of expert 0, then those of expert 1, and so on, each in order; tiles
    [t, 3] int32: (expert, begin, end) in `order`, with begin = end = 0 for those that are not used; and the
    most rows of a tile.
    """
    pairs = len(ids)
    rows = MANY_ROWS if pairs >= MANY_ROWS * experts else TILE_ROWS
    most = pairs // rows + min(experts, pairs)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.zeros(most, 3, dtype=torch.int32, device=ids.device)
    scan = FEW if pairs <= FEW else SCAN
    launch(_count, (experts,), ids, counts, pairs, SCAN=scan)
    constants = {"ROWS": rows, "SCAN": scan, "EXPERTS": block(experts)}
    launch(_group, (experts,), ids, counts, order, tiles, pairs, experts, **constants)
    return order, tiles, rows
