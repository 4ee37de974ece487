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
    valid,
    channel,
    channels,
    ring,
    PERIOD: tl.constexpr,
    HISTORY: tl.constexpr,
):
    """[positions, channels] inputs at some positions of a sequence: from HISTORY before the step's first on.

    rows: where the input of position 0 would be. page: the inputs just before the step, if they are there.
    """
    valid = valid[:, None] & (channel < channels)[None, :]
    in_step, in_history = valid & (position >= first)[:, None], valid & (position < first)[:, None]
    numbers = tl.load(rows + position[:, None] * channels + channel[None, :], mask=in_step, other=0.0)
    if first % PERIOD == 0:
        place = page + (position - first + HISTORY)[:, None] * channels
    else:
        place = seats + ((position + ring) % ring)[:, None] * channels
    return numbers + tl.load(place + channel[None, :], mask=in_history, other=0.0)


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
    HISTORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the last inputs of a sequence to its seat, and those before the last multiple to its page."""
    offset = tl.arange(0, BLOCK)
    position = context - ring + offset
    valid = (offset < ring) & (position >= first - HISTORY)
    numbers = _inputs(rows, seats, read, position, first, valid, channel, channels, ring, PERIOD, HISTORY)
    last = context // PERIOD * PERIOD + tl.zeros_like(offset)  # a mask is of blocks, not of numbers
    page_position = last - HISTORY + offset
    of_page = (offset < HISTORY) & (last > first)
    tail = _inputs(rows, seats, read, page_position, first, of_page, channel, channels, ring, PERIOD, HISTORY)
    tl.debug_barrier()  # all older inputs were read
    valid_channels = (channel < channels)[None, :]
    to_seat = seats + ((position + ring) % ring)[:, None] * channels + channel[None, :]
    tl.store(to_seat, numbers, mask=valid[:, None] & valid_channels)
    tl.store(
        write + offset[:, None] * channels + channel[None, :], tail, mask=of_page[:, None] & valid_channels
    )


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
    HISTORY: tl.constexpr,
):
    """Where a sequence's inputs are (see `_keep_inputs`), its first position in the step, and its end."""
    start, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    context = tl.load(contexts + sequence)
    first = context - (stop - start)
    page, write, seat = places(states, sequence, first, PERIOD)
    size = HISTORY * channels
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
    HISTORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of rows of one sequence. SINGLE: the sequence has no others, and its inputs are kept too."""
    tile, channel = tiles + 3 * tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.load(tile).to(tl.int64)
    if tl.load(states + 4 * sequence + 3) >= 0:
        row, stop = tl.load(tile + 1).to(tl.int64) + tl.arange(0, ROWS), tl.load(tile + 2)
        sequence_arguments = rows, seats, pages, contexts, starts, states, sequence, channels, ring
        of_rows, seat, read, write, first, context = _places(*sequence_arguments, PERIOD, HISTORY)
        position, valid_rows = row - tl.load(starts + sequence) + first, row < stop
        total = tl.zeros([ROWS, CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS):
            pointers = weight + channel * of_channel + tap * of_tap
            factor = tl.load(pointers, mask=channel < channels, other=0.0)
            input_arguments = of_rows, seat, read, position + (tap - HISTORY), first, valid_rows
            total += _inputs(*input_arguments, channel, channels, ring, PERIOD, HISTORY) * factor[None, :]
        if ACTIVATE:
            total = total * tl.sigmoid(total)
        mask = valid_rows[:, None] & (channel < channels)[None, :]
        tl.store(out + row[:, None] * channels + channel[None, :], total, mask=mask)
        if SINGLE:
            keep_arguments = of_rows, seat, read, write, first, context, channel, channels, ring
            _keep_inputs(*keep_arguments, PERIOD, HISTORY, BLOCK)


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
    HISTORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keeps the inputs of sequences with several rows."""
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(states + 4 * sequence + 3) >= 0:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        sequence_arguments = rows, seats, pages, contexts, starts, states, sequence, channels, ring
        of_rows, seat, read, write, first, context = _places(*sequence_arguments, PERIOD, HISTORY)
        keep_arguments = of_rows, seat, read, write, first, context, channel, channels, ring
        _keep_inputs(*keep_arguments, PERIOD, HISTORY, BLOCK)


def convolve(
    rows: torch.Tensor,
    weight: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
    activate: bool = True,
) -> torch.Tensor:
    """Computes what `reference.delta.convolve` computes."""
    rows, ring, step, tiles = rows.contiguous(), states.sizes.ring, *batch.state_sequences
    out, (channels, taps) = torch.empty_like(rows), weight.shape
    tile, blocks = 1 if step.single else STATE_TILE, triton.cdiv(channels, TILE_CHANNELS)
    sequences, shape = (step.contexts, step.starts, step.states), (channels, ring)
    common = {"PERIOD": CHUNK, "CHANNELS": TILE_CHANNELS, "HISTORY": taps - 1, "BLOCK": block(ring)}
    tails = states.tails, states.page_tails
    constants = {"TAPS": taps, "ACTIVATE": activate, "SINGLE": step.single, "ROWS": tile}
    arguments = (rows, weight, *tails, tiles, *sequences, out, *shape, *weight.stride())
    launch(_mix, (len(tiles), blocks), *arguments, **constants, **common)
    if not step.single:
        launch(_keep, (len(step.states), blocks), rows, *tails, *sequences, *shape, **common)
    return out
