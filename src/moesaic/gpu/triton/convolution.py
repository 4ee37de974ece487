"""Short convolutions over the rows of each sequence: one launch for decode, two for chunks of prompts.

A row's inputs before the step lie in the seat, or in a page where the step begins at a multiple of CHUNK. A
program has some channels, which depend on no others. Where a step has several rows of a sequence, the last
inputs are written by a second launch, when nobody reads the older ones any more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.gpu.triton.states import places
from moesaic.kernels.batch import STATE_TILE, AttentionBatch
from moesaic.kernels.states import CHUNK, LayerStates

TILE_CHANNELS = 128


@triton.jit
def _inputs(
    rows,
    seats,
    page,
    position,
    first,
    inside,
    channel,
    channels,
    ring,
    PERIOD: tl.constexpr,
    KEPT: tl.constexpr,
):
    """[positions, channels] inputs at some positions of a sequence: from KEPT before the step's first on.

    rows: where the input of position 0 would be. page: the inputs just before the step, if they are there.
    """
    inside = inside[:, None] & (channel < channels)[None, :]
    here, before = inside & (position >= first)[:, None], inside & (position < first)[:, None]
    numbers = tl.load(rows + position[:, None] * channels + channel[None, :], mask=here, other=0.0)
    if first % PERIOD == 0:
        place = page + (position - first + KEPT)[:, None] * channels
    else:
        place = seats + ((position + ring) % ring)[:, None] * channels
    return numbers + tl.load(place + channel[None, :], mask=before, other=0.0)


@triton.jit
def _keep_inputs(
    rows,
    seats,
    read,
    write,
    first,
    context,
    channel,
    channels,
    ring,
    PERIOD: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the last inputs of a sequence to its seat, and those before the last multiple to its page."""
    offset = tl.arange(0, BLOCK)
    position = context - ring + offset
    known = (offset < ring) & (position >= first - KEPT)
    numbers = _inputs(rows, seats, read, position, first, known, channel, channels, ring, PERIOD, KEPT)
    last = context // PERIOD * PERIOD + tl.zeros_like(offset)  # a mask is of blocks, not of numbers
    before = last - KEPT + offset
    of_page = (offset < KEPT) & (last > first)
    tail = _inputs(rows, seats, read, before, first, of_page, channel, channels, ring, PERIOD, KEPT)
    tl.debug_barrier()  # all older inputs were read
    inside = (channel < channels)[None, :]
    to_seat = seats + ((position + ring) % ring)[:, None] * channels + channel[None, :]
    tl.store(to_seat, numbers, mask=known[:, None] & inside)
    tl.store(write + offset[:, None] * channels + channel[None, :], tail, mask=of_page[:, None] & inside)


@triton.jit
def _places(
    rows,
    seats,
    pages,
    contexts,
    starts,
    states,
    sequence,
    channels,
    ring,
    PERIOD: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Where a sequence's inputs are (see `_keep_inputs`), its first position in the step, and its end."""
    start, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    context = tl.load(contexts + sequence)
    first = context - (stop - start)
    page, write, seat = places(states, sequence, first, PERIOD)
    size = KEPT * channels
    of_rows = rows + (start - first) * channels
    return of_rows, seats + seat * ring * channels, pages + page * size, pages + write * size, first, context


@triton.jit
def _mix(
    rows,
    weight,
    seats,
    pages,
    tiles,
    contexts,
    starts,
    states,
    out,
    channels,
    ring,
    of_channel,
    of_tap,
    PERIOD: tl.constexpr,
    TAPS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of rows of one sequence. SINGLE: the sequence has no others, and its inputs are kept too."""
    tile, channel = tiles + 3 * tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.load(tile).to(tl.int64)
    if tl.load(states + 4 * sequence + 3) >= 0:
        row, stop = tl.load(tile + 1).to(tl.int64) + tl.arange(0, ROWS), tl.load(tile + 2)
        known = rows, seats, pages, contexts, starts, states, sequence, channels, ring
        of_rows, seat, read, write, first, context = _places(*known, PERIOD, KEPT)
        position, inside = row - tl.load(starts + sequence) + first, row < stop
        total = tl.zeros([ROWS, CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS):
            of = weight + channel * of_channel + tap * of_tap
            factor = tl.load(of, mask=channel < channels, other=0.0)
            where = of_rows, seat, read, position + (tap - KEPT), first, inside
            total += _inputs(*where, channel, channels, ring, PERIOD, KEPT) * factor[None, :]
        if ACTIVATE:
            total = total * tl.sigmoid(total)
        mask = inside[:, None] & (channel < channels)[None, :]
        tl.store(out + row[:, None] * channels + channel[None, :], total, mask=mask)
        if SINGLE:
            kept = of_rows, seat, read, write, first, context, channel, channels, ring
            _keep_inputs(*kept, PERIOD, KEPT, BLOCK)


@triton.jit
def _keep(
    rows,
    seats,
    pages,
    contexts,
    starts,
    states,
    channels,
    ring,
    PERIOD: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keeps the inputs of sequences with several rows."""
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(states + 4 * sequence + 3) >= 0:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        known = rows, seats, pages, contexts, starts, states, sequence, channels, ring
        of_rows, seat, read, write, first, context = _places(*known, PERIOD, KEPT)
        kept = of_rows, seat, read, write, first, context, channel, channels, ring
        _keep_inputs(*kept, PERIOD, KEPT, BLOCK)


def convolve(
    rows: torch.Tensor,
    weight: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
    activate: bool = True,
) -> torch.Tensor:
    """As `reference.delta.convolve`."""
    rows, ring, step, tiles = rows.contiguous(), states.sizes.ring, *batch.state_sequences
    out, (channels, taps) = torch.empty_like(rows), weight.shape
    tile, blocks = 1 if step.single else STATE_TILE, triton.cdiv(channels, TILE_CHANNELS)
    sequences, shape = (step.contexts, step.starts, step.states), (channels, ring)
    common = {"PERIOD": CHUNK, "CHANNELS": TILE_CHANNELS, "KEPT": taps - 1, "BLOCK": block(ring)}
    kept = states.tails, states.page_tails
    constants = {"TAPS": taps, "ACTIVATE": activate, "SINGLE": step.single, "ROWS": tile}
    arguments = (rows, weight, *kept, tiles, *sequences, out, *shape, *weight.stride())
    launch(_mix, (len(tiles), blocks), *arguments, **constants, **common)
    if not step.single:
        launch(_keep, (len(step.states), blocks), rows, *kept, *sequences, *shape, **common)
    return out
