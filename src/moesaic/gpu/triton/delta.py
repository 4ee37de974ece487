"""The gated delta rule, in the form of `kernels.states`: one launch for decode, two for chunks of prompts.

A program has some columns of the values of one head of one sequence. Columns of a state depend on no others.
So it goes from one chunk of CHUNK positions to the next one alone, and writes the state between them to the
page. There are no atomics: the same step gives the same bits.

In a step of single rows a program is made of sums, since tiles of a product would be almost empty. In other
steps the CHUNK positions of a chunk are a tile: those before the step come from the seat. The updates of a
chunk solve a triangular system, row by row (Yang et al. 2024, section 3.3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.gpu.triton.states import places
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference.delta import KEY_EPSILON
from moesaic.kernels.states import CHUNK, LayerStates

COLUMNS = 32
"""Columns of values of a program."""
KEY_STEP = 16
"""Numbers of keys that a product of a chunk takes at a time."""
PRECISION = tl.constexpr("tf32x3")
"""Each number becomes two of TensorFloat-32, which hold nearly all of its bits."""


@triton.jit
def _softplus(numbers):
    """log(1 + exp(x)), also exact where exp(x) is small: then it is x - x * x / 2."""
    small = tl.exp(-tl.abs(numbers))
    whole = tl.where(small < 0.0009765625, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return tl.maximum(numbers, 0.0) + whole


@triton.jit
def _beta_and_log(gates, decay, bias, row, head, heads, mask):
    """What a head's gates in some rows say: beta, and the logarithm of alpha. Both 0 where not `mask`."""
    pointer = gates + row * (2 * heads) + head
    beta = tl.sigmoid(tl.load(pointer, mask=mask, other=0.0))
    alpha = tl.load(pointer + heads, mask=mask, other=0.0) + tl.load(bias + head)
    return tl.where(mask, beta, 0.0), tl.where(mask, tl.load(decay + head) * _softplus(alpha), 0.0)


@triton.jit
def _units(pointer, mask, factor, EPSILON: tl.constexpr):
    """Rows of keys or queries [rows, width], each of length `factor`."""
    numbers = tl.load(pointer, mask=mask, other=0.0)
    return numbers * (tl.rsqrt(tl.sum(numbers * numbers, 1) + EPSILON) * factor)[:, None]


@triton.jit
def _seat(
    keys, updates, decays, seat, key_head, head, key_heads, heads, key_width, width, PERIOD: tl.constexpr
):
    """Where a seat's keys, updates and decays of a head are."""
    of_keys = keys + (seat * key_heads + key_head) * PERIOD * key_width
    return of_keys, updates + (seat * heads + head) * PERIOD * width, decays + (seat * heads + head) * PERIOD


@triton.jit
def _sums_of_logs(decays, logs, old, slots, index):
    """[PERIOD] sums of the logarithms of the decay: those of the seat where `old`, then with `logs`."""
    before = tl.load(decays + slots, mask=old, other=0.0)
    last = tl.sum(tl.where(slots == index - 1, before, 0.0), 0)
    return tl.where(old, before, last + tl.cumsum(logs, 0))


@triton.jit
def _solve(factors, target, update, slots, index, end):
    """[PERIOD, columns] updates with those of places index : end, each of which needs those before it.

    factors: [PERIOD, PERIOD] how much of the updates before is taken from `target` of each place.
    """
    for line in range(index, end):
        mine = slots == line
        of_line = tl.sum(tl.where(mine[:, None], factors, 0.0), 0)
        known = tl.sum(tl.where((slots < line)[:, None], of_line[:, None] * update, 0.0), 0)
        update = tl.where(mine[:, None], target - known[None, :], update)
    return update


@triton.jit
def _decode(
    qkv,
    gates,
    decay,
    bias,
    pages,
    keys,
    updates,
    decays,
    contexts,
    states,
    out,
    key_heads,
    heads,
    key_width,
    width,
    channels,
    shorter,
    PERIOD: tl.constexpr,
    EPSILON: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute one row of each sequence."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    position, key_head = tl.load(contexts + row) - 1, head // (heads // key_heads)
    page, write, seat = places(states, row, position, PERIOD)
    if seat >= 0:
        index = position % PERIOD
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        along, since, here = tl.arange(0, KEY_BLOCK), tl.arange(0, PERIOD), tl.arange(0, 1)
        of_key, of_value, old = along < key_width, columns < width, since < index

        line = qkv + row * channels + key_head * key_width + here[:, None] + along[None, :]
        query = tl.sum(_units(line, of_key[None, :], shorter, EPSILON), 0)
        key = tl.sum(_units(line + key_heads * key_width, of_key[None, :], 1.0, EPSILON), 0)
        from_value = qkv + row * channels + 2 * key_heads * key_width + head * width + columns
        value = tl.load(from_value, mask=of_value, other=0.0)
        beta, log = _beta_and_log(gates, decay, bias, row + here, head, heads, here == 0)

        sizes = key_heads, heads, key_width, width
        seat_keys, seat_updates, seat_decays = _seat(
            keys, updates, decays, seat, key_head, head, *sizes, PERIOD
        )
        before = tl.load(seat_decays + since, mask=old, other=0.0)
        now = tl.sum(tl.where(since == index - 1, before, 0.0), 0) + tl.sum(log, 0)
        faded = tl.where(old, tl.exp(now - before), 0.0)
        at = seat_keys + since[:, None] * key_width + along[None, :]
        earlier = tl.load(at, mask=old[:, None] & of_key[None, :], other=0.0)
        at = seat_updates + since[:, None] * width + columns[None, :]
        updated = tl.load(at, mask=old[:, None] & of_value[None, :], other=0.0)
        place = head * key_width * width + along[:, None] * width + columns[None, :]
        size, inside = heads * key_width * width, of_key[:, None] & of_value[None, :]
        state = tl.load(pages + page * size + place, mask=inside, other=0.0)

        left = tl.exp(now)
        predicted = left * tl.sum(state * key[:, None], 0)
        predicted += tl.sum((tl.sum(earlier * key[None, :], 1) * faded)[:, None] * updated, 0)
        update = tl.sum(beta, 0) * (value - predicted)
        read = left * tl.sum(state * query[:, None], 0)
        read += tl.sum((tl.sum(earlier * query[None, :], 1) * faded)[:, None] * updated, 0)
        read += tl.sum(key * query, 0) * update
        tl.store(out + (row * heads + head) * width + columns, read, mask=of_value)
        tl.store(seat_updates + index * width + columns, update, mask=of_value)
        # Programs of other columns and heads write the same. Nobody reads this row of the seat in this step.
        tl.store(seat_keys + index * key_width + along, key, mask=of_key)
        tl.store(seat_decays + index, now)
        if index == PERIOD - 1:
            weighed = (earlier * faded[:, None]).trans()
            added = tl.dot(weighed, updated, input_precision=PRECISION) + key[:, None] * update[None, :]
            tl.store(pages + write * size + place, left * state + added, mask=inside)


@triton.jit
def _scale(pointer, mask, width, factor, EPSILON: tl.constexpr, KEY_STEP: tl.constexpr):
    """[lines] what makes rows of keys or queries as long as `factor`. pointer: of their first numbers."""
    total = tl.sum(tl.zeros([mask.shape[0], KEY_STEP], tl.float32), 1)
    along = tl.arange(0, KEY_STEP)
    for step in range(0, width, KEY_STEP):
        there = mask[:, None] & (along + step < width)[None, :]
        numbers = tl.load(pointer[:, None] + (along + step)[None, :], mask=there, other=0.0)
        total += tl.sum(numbers * numbers, 1)
    return tl.rsqrt(total + EPSILON) * factor


@triton.jit
def _key_part(pointer, old_keys, scale, old, new, dims, width):
    """[PERIOD, KEY_STEP] a part of the keys: of the rows before the step from the seat, else scaled."""
    mask = (dims < width)[None, :]
    fresh = tl.load(pointer[:, None] + dims[None, :], mask=new[:, None] & mask, other=0.0)
    known = tl.load(old_keys[:, None] + dims[None, :], mask=old[:, None] & mask, other=0.0)
    return fresh * scale[:, None] + known


@triton.jit
def _products(
    from_query,
    from_key,
    old_keys,
    from_state,
    scales,
    old,
    new,
    key_width,
    width,
    of_value,
    PERIOD: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """Products of keys and of queries with keys, and of both with the state."""
    keys, queries = tl.zeros([PERIOD, PERIOD], tl.float32), tl.zeros([PERIOD, PERIOD], tl.float32)
    of_keys, of_queries = tl.zeros([PERIOD, COLUMNS], tl.float32), tl.zeros([PERIOD, COLUMNS], tl.float32)
    for step in range(0, key_width, KEY_STEP):
        along = step + tl.arange(0, KEY_STEP)
        inside = along < key_width
        query = tl.load(from_query[:, None] + along[None, :], mask=new[:, None] & inside[None, :], other=0.0)
        query = query * scales[0][:, None]
        key = _key_part(from_key, old_keys, scales[1], old, new, along, key_width)
        at_state = from_state[None, :] + along[:, None] * width
        state = tl.load(at_state, mask=inside[:, None] & of_value[None, :], other=0.0)
        keys = tl.dot(key, key.trans(), keys, input_precision=PRECISION)
        queries = tl.dot(query, key.trans(), queries, input_precision=PRECISION)
        of_keys = tl.dot(key, state, of_keys, input_precision=PRECISION)
        of_queries = tl.dot(query, state, of_queries, input_precision=PRECISION)
    return keys, queries, of_keys, of_queries


@triton.jit
def _new_state(
    from_key,
    old_keys,
    scale,
    from_state,
    to_state,
    now,
    update,
    old,
    new,
    slots,
    key_width,
    width,
    of_value,
    PERIOD: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """Writes the state after a whole chunk."""
    last = tl.sum(tl.where(slots == PERIOD - 1, now, 0.0), 0)
    for step in range(0, key_width, KEY_STEP):
        along = step + tl.arange(0, KEY_STEP)
        inside, at = (along < key_width)[:, None] & of_value[None, :], along[:, None] * width
        key = _key_part(from_key, old_keys, scale, old, new, along, key_width) * tl.exp(last - now)[:, None]
        state = tl.exp(last) * tl.load(from_state[None, :] + at, mask=inside, other=0.0)
        state = tl.dot(key.trans(), update, state, input_precision=PRECISION)
        tl.store(to_state[None, :] + at, state, mask=inside)


@triton.jit
def _chunks(
    qkv,
    gates,
    decay,
    bias,
    pages,
    keys,
    updates,
    decays,
    contexts,
    starts,
    states,
    out,
    key_heads,
    heads,
    key_width,
    width,
    channels,
    shorter,
    PERIOD: tl.constexpr,
    EPSILON: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """All rows of each sequence, chunk by chunk. Writes outputs, updates and pages."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    position, key_head = tl.load(contexts + sequence) - (stop - row), head // (heads // key_heads)
    page, write, seat = places(states, sequence, position, PERIOD)
    columns, since = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PERIOD)
    of_value = columns < width
    sizes = key_heads, heads, key_width, width
    seat_keys, seat_updates, seat_decays = _seat(keys, updates, decays, seat, key_head, head, *sizes, PERIOD)
    kept, at_seat = seat_keys + since * key_width, seat_updates + since[:, None] * width + columns[None, :]
    while row < stop:
        index = position % PERIOD
        end = tl.minimum(index + stop - row, PERIOD)
        old, new = since < index, (since >= index) & (since < end)
        lines = row + since - index  # rows of the step, where new
        from_query = qkv + lines * channels + key_head * key_width
        from_key, mask = from_query + key_heads * key_width, new[:, None] & of_value[None, :]
        key_scale = _scale(from_key, new, key_width, 1.0, EPSILON, KEY_STEP)
        scales = _scale(from_query, new, key_width, shorter, EPSILON, KEY_STEP), key_scale
        from_state = pages + (page * heads + head) * key_width * width + columns
        known = from_query, from_key, kept, from_state, scales, old, new, key_width, width, of_value
        of_keys, of_query, predicted, found = _products(*known, PERIOD, COLUMNS, KEY_STEP)

        from_value = qkv + lines[:, None] * channels + 2 * key_heads * key_width + head * width
        value = tl.load(from_value + columns[None, :], mask=mask, other=0.0)
        beta, log = _beta_and_log(gates, decay, bias, lines, head, heads, new)
        now = _sums_of_logs(seat_decays, log, old, since, index)
        left, faded = tl.exp(now)[:, None], tl.exp(now[:, None] - now[None, :])
        update = tl.load(at_seat, mask=old[:, None] & of_value[None, :], other=0.0)
        of_keys = beta[:, None] * tl.where(since[:, None] > since[None, :], of_keys * faded, 0.0)
        update = _solve(of_keys, beta[:, None] * (value - left * predicted), update, since, index, end)
        tl.store(at_seat, update, mask=mask)
        of_query = tl.where(since[:, None] >= since[None, :], of_query * faded, 0.0)
        found = tl.dot(of_query, update, left * found, input_precision=PRECISION)
        tl.store(out + (lines[:, None] * heads + head) * width + columns[None, :], found, mask=mask)
        if end == PERIOD:
            to_state = pages + (write * heads + head) * key_width * width + columns
            chunk = from_key, kept, key_scale, from_state, to_state, now, update, old, new, since
            _new_state(*chunk, key_width, width, of_value, PERIOD, KEY_STEP)
            tl.debug_barrier()  # other threads read it in the next chunk
            page = write
        row += end - index
        position += end - index


@triton.jit
def _keep(
    qkv,
    gates,
    decay,
    bias,
    keys,
    decays,
    contexts,
    starts,
    states,
    key_heads,
    heads,
    key_width,
    channels,
    PERIOD: tl.constexpr,
    EPSILON: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """Writes keys and decays of the rows behind the last chunk. Before it, `_chunks` has read older ones."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    seat, context = tl.load(states + 4 * sequence + 3), tl.load(contexts + sequence)
    last = context // PERIOD * PERIOD
    first = tl.maximum(context - (stop - row), last)  # position of the first row that is kept
    if first < context:
        index, key_head = first - last, head // (heads // key_heads)
        along, since = tl.arange(0, KEY_BLOCK), tl.arange(0, PERIOD)
        new = (since >= index) & (since < context - last)
        lines = stop - context + last + since
        mask = new[:, None] & (along < key_width)[None, :]
        from_key = qkv + lines[:, None] * channels + (key_heads + key_head) * key_width + along[None, :]
        kept = keys + (seat * key_heads + key_head) * PERIOD * key_width + since[:, None] * key_width
        if head % (heads // key_heads) == 0:
            tl.store(kept + along[None, :], _units(from_key, mask, 1.0, EPSILON), mask=mask)
        _, log = _beta_and_log(gates, decay, bias, lines, head, heads, new)
        seat_decays = decays + (seat * heads + head) * PERIOD
        tl.store(seat_decays + since, _sums_of_logs(seat_decays, log, since < index, since, index), mask=new)


def delta(
    mixed_rows: torch.Tensor,
    gates: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Compute what `reference.delta.delta` does."""
    mixed_rows, gates, sizes, (step, _) = (
        mixed_rows.contiguous(),
        gates.contiguous(),
        states.sizes,
        batch.state_sequences,
    )
    count, heads, width = len(mixed_rows), sizes.value_heads, sizes.value_width
    out = mixed_rows.new_empty(count, heads, width)
    inputs, seats = (mixed_rows, gates, decay, bias), (states.keys, states.updates, states.decays)
    common = {"PERIOD": CHUNK, "EPSILON": KEY_EPSILON}
    wide = {"KEY_BLOCK": block(sizes.key_width, least=16)}
    shape = (sizes.key_heads, heads, sizes.key_width, width, sizes.channels, sizes.key_width**-0.5)
    grid = (len(step.states), heads, triton.cdiv(width, COLUMNS))
    if step.single:
        arguments = (*inputs, states.pages, *seats, step.contexts, step.states, out, *shape)
        launch(_decode, grid, *arguments, COLUMNS=COLUMNS, **wide, **common)
        return out
    sequences = (step.contexts, step.starts, step.states)
    tiles = {"COLUMNS": COLUMNS, "KEY_STEP": KEY_STEP}
    launch(_chunks, grid, *inputs, states.pages, *seats, *sequences, out, *shape, **tiles, **common)
    kept = (*inputs, states.keys, states.decays, *sequences, *shape[:3], sizes.channels)
    launch(_keep, grid[:2], *kept, **wide, **common)
    return out
