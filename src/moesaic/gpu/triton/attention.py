"""Attention over the paged cache, for decode and chunks of prompts alike, in one launch or two.

A program computes some rows of one sequence for all query heads that share a key head. So a block of keys
is read once for them. It goes over the keys a few at a time and keeps a running softmax (FlashAttention, Dao
et al. 2022). Where every sequence of a step has one row, the keys of a long context are split among programs
at multiples of SPLIT tokens, and a second kernel merges the parts in their order. There are no atomics: the
same step gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.gpu.triton.product import product
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import SCALE_BYTES, width_of

LINES = 16
"""Lines of a tile: rows times query heads of a key head. Tensor cores take at least 16."""
MANY_LINES = 64
"""Lines of a tile where the step has sequences with several rows, and products take 16 bits."""
KEYS = 32
"""Cached tokens that are attended to at a time."""
WIDE, FEW_KEYS, KEY_STEP = 256, 16, 128
"""Keys wider than WIDE numbers are attended to FEW_KEYS at a time, and values as wide by LINES lines a tile.
Products take KEY_STEP numbers of a key at a time. So tiles fit the memory of a multiprocessor."""
SPLIT = 1024
"""Cached tokens of a part, where the keys of a sequence are split."""


@triton.jit
def _load_cached(
    base, slot, valid, columns, width, heads, head, size, INT8: tl.constexpr, SCALE: tl.constexpr
):
    """Rows of the cache [slots, columns] as numbers that products take, and a factor of each row [slots]."""
    line = width + SCALE if INT8 else width
    first = base + (slot.to(tl.int64) * heads + head) * line
    pointers, mask = first[:, None] + columns[None, :], valid[:, None] & (columns < size)[None, :]
    if INT8:
        numbers = tl.load(pointers, mask=mask, other=0).to(tl.float32)
        bits = tl.load(first + width, mask=valid, other=0).to(tl.int32) & 255
        for byte in tl.static_range(1, SCALE):
            bits |= (tl.load(first + width + byte, mask=valid, other=0).to(tl.int32) & 255) << (8 * byte)
        return numbers, bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(pointers, mask=mask, other=0.0), tl.full(slot.shape, 1.0, tl.float32)


@triton.jit
def _scores(
    read,
    rows,
    valid_lines,
    keys,
    slot,
    valid,
    stored_width,
    heads,
    head,
    key_width,
    INT8: tl.constexpr,
    SCALE: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """Products of query lines with keys [lines, keys], KEY_STEP numbers at a time.

    read: where the lines are. rows: their first KEY_STEP numbers.
    """
    columns = tl.arange(0, KEY_STEP)
    key, factor = _load_cached(keys, slot, valid, columns, stored_width, heads, head, key_width, INT8, SCALE)
    scores = product(rows, key, tl.zeros([LINES, KEYS], tl.float32))
    for step in range(KEY_STEP, key_width, KEY_STEP):
        next_columns, mask = columns + step, valid_lines[:, None] & (columns + step < key_width)[None, :]
        key, factor = _load_cached(
            keys, slot, valid, next_columns, stored_width, heads, head, key_width, INT8, SCALE
        )
        scores = product(tl.load(read + step, mask=mask, other=0.0), key, scores)
    return scores * factor[None, :]


@triton.jit
def _with_sink(sinks, query_head, valid_lines, peak, total, weighted_values):
    """The sum and the mixed values, after each line's sink has taken its part of the softmax."""
    sink = tl.load(sinks + query_head, mask=valid_lines, other=0.0)
    higher = tl.maximum(peak, sink)
    shrink = tl.exp(peak - higher)
    return total * shrink + tl.exp(sink - higher), weighted_values * shrink[:, None]


@triton.jit
def _weigh(scores, visible, peak, total):
    """The running softmax after more scores [lines, keys]: weights, the new peak and sum, and the old
    ones' factor."""
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing was seen yet
    shrink = tl.exp(peak - base)
    weights = tl.exp(scores - base[:, None])
    return weights, higher, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def _attend(
    query,
    keys,
    values,
    sinks,
    tiles,
    contexts,
    starts,
    tables,
    out,
    peaks,
    sums,
    scale,
    window,
    line,
    head_line,
    key_width,
    value_width,
    stored_width,
    table_width,
    heads,
    group,
    tile_heads,
    BLOCK_SIZE: tl.constexpr,
    IN_KEY: tl.constexpr,
    INT8: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    KEY_STEP: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    tile, part = tiles + 3 * tl.program_id(0), tl.program_id(2)
    head, of_group = tl.program_id(1) % heads, tl.program_id(1) // heads
    sequence, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    lines, columns, places = tl.arange(0, LINES), tl.arange(0, KEY_STEP), tl.arange(0, VALUE_BLOCK)
    row, in_group = first + lines // tile_heads, of_group * tile_heads + lines % tile_heads
    valid_lines, query_head = (row < stop) & (in_group < group), head * group + in_group
    position_offset = (tl.load(contexts + sequence) - tl.load(starts + sequence + 1)).to(
        tl.int32
    )  # and row: position
    read = query + row[:, None].to(tl.int64) * line + query_head[:, None] * head_line + columns[None, :]
    rows = tl.load(read, mask=valid_lines[:, None] & (columns < key_width)[None, :], other=0.0)
    peak, total = tl.full([LINES], float("-inf"), tl.float32), tl.zeros([LINES], tl.float32)
    weighted_values = tl.zeros([LINES, VALUE_BLOCK], tl.float32)
    # The cache may hold anything, NaN as well, where no row of the tile looks.
    first_token, end = (
        tl.maximum(0, position_offset + first - window + 1) if WINDOW else 0,
        position_offset + stop,
    )
    begin = first_token // KEYS * KEYS
    if SPLITS > 1:
        begin, end = tl.maximum(begin, part * SPLIT), tl.minimum(end, (part + 1) * SPLIT)
    for token_begin in range(begin, end, KEYS):
        token = token_begin + tl.arange(0, KEYS)
        valid = (token >= first_token) & (token < end)
        visible = valid[None, :] & (token[None, :] <= (position_offset + row)[:, None]) & valid_lines[:, None]
        if WINDOW:
            visible = visible & (token[None, :] > (position_offset + row - window)[:, None])
        block = tables + sequence.to(tl.int64) * table_width + token // BLOCK_SIZE
        slot = tl.load(block, mask=valid, other=0) * BLOCK_SIZE + token % BLOCK_SIZE
        key_arguments = keys, slot, valid, stored_width, heads, head, key_width
        scores = _scores(read, rows, valid_lines, *key_arguments, INT8, SCALE, LINES, KEYS, KEY_STEP)
        weights, peak, total, shrink = _weigh(scores * scale, visible, peak, total)
        base, size = (keys, stored_width) if IN_KEY else (values, value_width)
        value, of_value = _load_cached(base, slot, valid, places, size, heads, head, value_width, INT8, SCALE)
        weights = tl.where(visible, weights * of_value[None, :], 0.0)
        weighted_values = product(weights, value.trans(), weighted_values * shrink[:, None])
    target = row.to(tl.int64) * (heads * group) + query_head
    if SPLITS > 1:
        target = target * SPLITS + part
        tl.store(peaks + target, peak, mask=valid_lines)
        tl.store(sums + target, total, mask=valid_lines)
    else:
        if SINKS:
            total, weighted_values = _with_sink(sinks, query_head, valid_lines, peak, total, weighted_values)
        weighted_values = (
            weighted_values / tl.where(total == 0.0, 1.0, total)[:, None]
        )  # a padded row has seen nothing
    write = out + target[:, None] * value_width + places[None, :]
    tl.store(write, weighted_values, mask=valid_lines[:, None] & (places < value_width)[None, :])


@triton.jit
def _join(
    parts,
    peaks,
    sums,
    sinks,
    out,
    heads,
    width,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the parts of one row and query head in their order."""
    head, columns = tl.program_id(1), tl.arange(0, BLOCK)
    target = tl.program_id(0).to(tl.int64) * heads + head
    mask = columns < width
    part_offsets = target * SPLITS + tl.arange(0, SPLITS)
    peak = tl.max(tl.load(peaks + part_offsets), 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # nothing was seen
    total, weighted_values = tl.zeros([1], tl.float32), tl.zeros([BLOCK], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head + tl.arange(0, 1))
        peak = tl.maximum(peak, tl.max(sink, 0))
        total += tl.exp(sink - peak)
    for part in range(SPLITS):
        part_offset = target * SPLITS + part
        factor = tl.exp(tl.load(peaks + part_offset) - peak)
        total += tl.load(sums + part_offset) * factor
        weighted_values += tl.load(parts + part_offset * width + columns, mask=mask, other=0.0) * factor
    tl.store(out + target * width + columns, weighted_values / tl.where(total == 0.0, 1.0, total), mask=mask)


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
    """Computes what `reference.attention.paged_attention` computes.

    Rows take the cache's type in both products, where that is a float type of 16 bits.
    """
    width = value_width if value_width is not None else width_of(keys if values is None else values)
    query = query if query.stride(-1) == 1 else query.contiguous()
    count, heads, key_width = query.shape
    out = query.new_empty(count, heads, width)
    if not count:
        return out
    step, key_heads = batch.on_device, keys.shape[2]
    group = heads // key_heads
    has_few_lines = step.single or width > WIDE or keys.element_size() != 2
    lines = LINES if has_few_lines else MANY_LINES
    tile_heads = min(group, lines)
    splits = block(triton.cdiv(step.longest, SPLIT)) if step.single and sliding_window is None else 1
    shape = (count, heads, splits)
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts, peaks, sums = query.new_empty(*shape, width), query.new_empty(shape), query.new_empty(shape)
    tiles = batch.tiles(lines // tile_heads)
    cache = keys.contiguous(), keys if values is None else values.contiguous()
    sink_tensor = query if sinks is None else sinks
    tensors = (query, *cache, sink_tensor, tiles, step.contexts, step.starts, step.tables, parts, peaks, sums)
    widths = (*query.stride()[:2], key_width, width, width_of(keys), step.tables.shape[1], key_heads, group)
    widths = (*widths, tile_heads)
    constants = _constants(keys, values is None, batch.block_size, (key_width, width), lines)
    constants["WINDOW"] = sliding_window is not None
    common = {"SPLITS": splits, "SINKS": sinks is not None}
    grid = (len(tiles), key_heads * triton.cdiv(group, tile_heads), splits)
    launch(_attend, grid, *tensors, scale, sliding_window or 0, *widths, **constants, **common)
    if splits > 1:
        arguments = (parts, peaks, sums, sink_tensor, out, heads, width)
        launch(_join, (count, heads), *arguments, BLOCK=block(width), **common)
    return out


def _constants(
    keys: torch.Tensor, in_key: bool, block_size: int, widths: tuple[int, int], lines: int
) -> dict[str, int]:
    """Constants of `_attend`. widths: of a key and of a value, in numbers."""
    return {
        "BLOCK_SIZE": block_size,
        "IN_KEY": in_key,
        "INT8": keys.dtype is torch.int8,
        "SCALE": SCALE_BYTES,
        "SPLIT": SPLIT,
        "LINES": lines,
        "KEYS": KEYS if widths[0] <= WIDE else FEW_KEYS,
        "KEY_STEP": block(min(widths[0], KEY_STEP), least=16),
        "VALUE_BLOCK": block(widths[1], least=16),
    }
