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
    log_term = tl.where(small < 0.0009765625, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return tl.maximum(numbers, 0.0) + log_term


@triton.jit
def _beta_and_log(gates, decay, bias, row, head, heads, mask):
    """What a head's gates in some rows say: beta, and the logarithm of alpha. Both 0 where not `mask`."""
    gate_pointers = gates + row * (2 * heads) + head
    beta = tl.sigmoid(tl.load(gate_pointers, mask=mask, other=0.0))
    alpha = tl.load(gate_pointers + heads, mask=mask, other=0.0) + tl.load(bias + head)
    return tl.where(mask, beta, 0.0), tl.where(mask, tl.load(decay + head) * _softplus(alpha), 0.0)


@triton.jit
def _units(pointers, mask, factor, EPSILON: tl.constexpr):
    """Rows of keys or queries [rows, width], each of length `factor`."""
    numbers = tl.load(pointers, mask=mask, other=0.0)
    return numbers * (tl.rsqrt(tl.sum(numbers * numbers, 1) + EPSILON) * factor)[:, None]


@triton.jit
def _seat(
    keys, updates, decays, seat, key_head, head, key_heads, heads, key_width, width, PERIOD: tl.constexpr
):
    """Where a seat's keys, updates and decays of a head are."""
    of_keys = keys + (seat * key_heads + key_head) * PERIOD * key_width
    return of_keys, updates + (seat * heads + head) * PERIOD * width, decays + (seat * heads + head) * PERIOD


@triton.jit
def _sums_of_logs(decays, logs, old, chunk_offsets, index):
    """[PERIOD] sums of the logarithms of the decay: those of the seat where `old`, then with `logs`."""
    earlier_sums = tl.load(decays + chunk_offsets, mask=old, other=0.0)
    last = tl.sum(tl.where(chunk_offsets == index - 1, earlier_sums, 0.0), 0)
    return tl.where(old, earlier_sums, last + tl.cumsum(logs, 0))


@triton.jit
def _solve_updates(factors, targets, update, chunk_offsets, index, end):
    """[PERIOD, columns] updates with those of places index : end, each of which needs those before it.

    factors: [PERIOD, PERIOD] how much of the updates before is taken from `targets` of each place.
    """
    for line in range(index, end):
        is_line = chunk_offsets == line
        of_line = tl.sum(tl.where(is_line[:, None], factors, 0.0), 0)
        earlier_share = tl.sum(tl.where((chunk_offsets < line)[:, None], of_line[:, None] * update, 0.0), 0)
        update = tl.where(is_line[:, None], targets - earlier_share[None, :], update)
    return update


@triton.jit
def _decode(
    mixed_rows,
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
    """Each program computes one row of a sequence."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    position, key_head = tl.load(contexts + row) - 1, head // (heads // key_heads)
    page, write, seat = places(states, row, position, PERIOD)
    if seat >= 0:
        index = position % PERIOD
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        key_columns, chunk_offsets, row_offsets = (
            tl.arange(0, KEY_BLOCK),
            tl.arange(0, PERIOD),
            tl.arange(0, 1),
        )
        of_key, of_value, old = key_columns < key_width, columns < width, chunk_offsets < index

        line = (
            mixed_rows + row * channels + key_head * key_width + row_offsets[:, None] + key_columns[None, :]
        )
        query = tl.sum(_units(line, of_key[None, :], shorter, EPSILON), 0)
        key = tl.sum(_units(line + key_heads * key_width, of_key[None, :], 1.0, EPSILON), 0)
        from_value = mixed_rows + row * channels + 2 * key_heads * key_width + head * width + columns
        value = tl.load(from_value, mask=of_value, other=0.0)
        beta, log = _beta_and_log(gates, decay, bias, row + row_offsets, head, heads, row_offsets == 0)

        sizes = key_heads, heads, key_width, width
        seat_keys, seat_updates, seat_decays = _seat(
            keys, updates, decays, seat, key_head, head, *sizes, PERIOD
        )
        earlier_sums = tl.load(seat_decays + chunk_offsets, mask=old, other=0.0)
        now = tl.sum(tl.where(chunk_offsets == index - 1, earlier_sums, 0.0), 0) + tl.sum(log, 0)
        decay_factors = tl.where(old, tl.exp(now - earlier_sums), 0.0)
        pointers = seat_keys + chunk_offsets[:, None] * key_width + key_columns[None, :]
        earlier_keys = tl.load(pointers, mask=old[:, None] & of_key[None, :], other=0.0)
        pointers = seat_updates + chunk_offsets[:, None] * width + columns[None, :]
        earlier_updates = tl.load(pointers, mask=old[:, None] & of_value[None, :], other=0.0)
        place = head * key_width * width + key_columns[:, None] * width + columns[None, :]
        size, state_mask = heads * key_width * width, of_key[:, None] & of_value[None, :]
        state = tl.load(pages + page * size + place, mask=state_mask, other=0.0)

        left = tl.exp(now)
        prediction = left * tl.sum(state * key[:, None], 0)
        prediction += tl.sum(
            (tl.sum(earlier_keys * key[None, :], 1) * decay_factors)[:, None] * earlier_updates, 0
        )
        update = tl.sum(beta, 0) * (value - prediction)
        read = left * tl.sum(state * query[:, None], 0)
        read += tl.sum(
            (tl.sum(earlier_keys * query[None, :], 1) * decay_factors)[:, None] * earlier_updates, 0
        )
        read += tl.sum(key * query, 0) * update
        tl.store(out + (row * heads + head) * width + columns, read, mask=of_value)
        tl.store(seat_updates + index * width + columns, update, mask=of_value)
        # Programs of other columns and heads write the same. Nobody reads this row of the seat in this step.
        tl.store(seat_keys + index * key_width + key_columns, key, mask=of_key)
        tl.store(seat_decays + index, now)
        if index == PERIOD - 1:
            weighted_keys = (earlier_keys * decay_factors[:, None]).trans()
            addend = (
                tl.dot(weighted_keys, earlier_updates, input_precision=PRECISION)
                + key[:, None] * update[None, :]
            )
            tl.store(pages + write * size + place, left * state + addend, mask=state_mask)


@triton.jit
def _scale(pointers, mask, width, factor, EPSILON: tl.constexpr, KEY_STEP: tl.constexpr):
    """[lines] what makes rows of keys or queries as long as `factor`. pointers: of their first numbers."""
    total = tl.sum(tl.zeros([mask.shape[0], KEY_STEP], tl.float32), 1)
    key_columns = tl.arange(0, KEY_STEP)
    for step in range(0, width, KEY_STEP):
        valid = mask[:, None] & (key_columns + step < width)[None, :]
        numbers = tl.load(pointers[:, None] + (key_columns + step)[None, :], mask=valid, other=0.0)
        total += tl.sum(numbers * numbers, 1)
    return tl.rsqrt(total + EPSILON) * factor


@triton.jit
def _key_part(pointers, seat_keys, scale, old, new, key_columns, width):
    """[PERIOD, KEY_STEP] a part of the keys: of the rows before the step from the seat, else scaled."""
    valid_columns = (key_columns < width)[None, :]
    fresh = tl.load(pointers[:, None] + key_columns[None, :], mask=new[:, None] & valid_columns, other=0.0)
    earlier_keys = tl.load(
        seat_keys[:, None] + key_columns[None, :], mask=old[:, None] & valid_columns, other=0.0
    )
    return fresh * scale[:, None] + earlier_keys


@triton.jit
def _products(
    from_query,
    from_key,
    seat_keys,
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
        key_columns = step + tl.arange(0, KEY_STEP)
        valid_columns = key_columns < key_width
        query = tl.load(
            from_query[:, None] + key_columns[None, :], mask=new[:, None] & valid_columns[None, :], other=0.0
        )
        query = query * scales[0][:, None]
        key = _key_part(from_key, seat_keys, scales[1], old, new, key_columns, key_width)
        at_state = from_state[None, :] + key_columns[:, None] * width
        state = tl.load(at_state, mask=valid_columns[:, None] & of_value[None, :], other=0.0)
        keys = tl.dot(key, key.trans(), keys, input_precision=PRECISION)
        queries = tl.dot(query, key.trans(), queries, input_precision=PRECISION)
        of_keys = tl.dot(key, state, of_keys, input_precision=PRECISION)
        of_queries = tl.dot(query, state, of_queries, input_precision=PRECISION)
    return keys, queries, of_keys, of_queries


@triton.jit
def _new_state(
    from_key,
    seat_keys,
    scale,
    from_state,
    to_state,
    now,
    update,
    old,
    new,
    chunk_offsets,
    key_width,
    width,
    of_value,
    PERIOD: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """Writes the state after a whole chunk."""
    last = tl.sum(tl.where(chunk_offsets == PERIOD - 1, now, 0.0), 0)
    for step in range(0, key_width, KEY_STEP):
        key_columns = step + tl.arange(0, KEY_STEP)
        state_mask, state_offsets = (
            (key_columns < key_width)[:, None] & of_value[None, :],
            key_columns[:, None] * width,
        )
        key = (
            _key_part(from_key, seat_keys, scale, old, new, key_columns, key_width)
            * tl.exp(last - now)[:, None]
        )
        state = tl.exp(last) * tl.load(from_state[None, :] + state_offsets, mask=state_mask, other=0.0)
        state = tl.dot(key.trans(), update, state, input_precision=PRECISION)
        tl.store(to_state[None, :] + state_offsets, state, mask=state_mask)


@triton.jit
def _chunks(
    mixed_rows,
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
    columns, chunk_offsets = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PERIOD)
    of_value = columns < width
    sizes = key_heads, heads, key_width, width
    seat_keys, seat_updates, seat_decays = _seat(keys, updates, decays, seat, key_head, head, *sizes, PERIOD)
    seat_key_lines, at_seat = (
        seat_keys + chunk_offsets * key_width,
        seat_updates + chunk_offsets[:, None] * width + columns[None, :],
    )
    while row < stop:
        index = position % PERIOD
        end = tl.minimum(index + stop - row, PERIOD)
        old, new = chunk_offsets < index, (chunk_offsets >= index) & (chunk_offsets < end)
        lines = row + chunk_offsets - index  # rows of the step, where new
        from_query = mixed_rows + lines * channels + key_head * key_width
        from_key, mask = from_query + key_heads * key_width, new[:, None] & of_value[None, :]
        key_scale = _scale(from_key, new, key_width, 1.0, EPSILON, KEY_STEP)
        scales = _scale(from_query, new, key_width, shorter, EPSILON, KEY_STEP), key_scale
        from_state = pages + (page * heads + head) * key_width * width + columns
        product_arguments = (
            from_query,
            from_key,
            seat_key_lines,
            from_state,
            scales,
            old,
            new,
            key_width,
            width,
            of_value,
        )
        of_keys, of_query, prediction, outputs = _products(*product_arguments, PERIOD, COLUMNS, KEY_STEP)

        from_value = mixed_rows + lines[:, None] * channels + 2 * key_heads * key_width + head * width
        value = tl.load(from_value + columns[None, :], mask=mask, other=0.0)
        beta, log = _beta_and_log(gates, decay, bias, lines, head, heads, new)
        now = _sums_of_logs(seat_decays, log, old, chunk_offsets, index)
        left, decay_factors = tl.exp(now)[:, None], tl.exp(now[:, None] - now[None, :])
        update = tl.load(at_seat, mask=old[:, None] & of_value[None, :], other=0.0)
        of_keys = beta[:, None] * tl.where(
            chunk_offsets[:, None] > chunk_offsets[None, :], of_keys * decay_factors, 0.0
        )
        update = _solve_updates(
            of_keys, beta[:, None] * (value - left * prediction), update, chunk_offsets, index, end
        )
        tl.store(at_seat, update, mask=mask)
        of_query = tl.where(chunk_offsets[:, None] >= chunk_offsets[None, :], of_query * decay_factors, 0.0)
        outputs = tl.dot(of_query, update, left * outputs, input_precision=PRECISION)
        tl.store(out + (lines[:, None] * heads + head) * width + columns[None, :], outputs, mask=mask)
        if end == PERIOD:
            to_state = pages + (write * heads + head) * key_width * width + columns
            chunk = (
                from_key,
                seat_key_lines,
                key_scale,
                from_state,
                to_state,
                now,
                update,
                old,
                new,
                chunk_offsets,
            )
            _new_state(*chunk, key_width, width, of_value, PERIOD, KEY_STEP)
            tl.debug_barrier()  # other threads read it in the next chunk
            page = write
        row += end - index
        position += end - index


@triton.jit
def _keep(
    mixed_rows,
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
        key_columns, chunk_offsets = tl.arange(0, KEY_BLOCK), tl.arange(0, PERIOD)
        new = (chunk_offsets >= index) & (chunk_offsets < context - last)
        lines = stop - context + last + chunk_offsets
        mask = new[:, None] & (key_columns < key_width)[None, :]
        from_key = (
            mixed_rows + lines[:, None] * channels + (key_heads + key_head) * key_width + key_columns[None, :]
        )
        key_lines = (
            keys + (seat * key_heads + key_head) * PERIOD * key_width + chunk_offsets[:, None] * key_width
        )
        if head % (heads // key_heads) == 0:
            tl.store(key_lines + key_columns[None, :], _units(from_key, mask, 1.0, EPSILON), mask=mask)
        _, log = _beta_and_log(gates, decay, bias, lines, head, heads, new)
        seat_decays = decays + (seat * heads + head) * PERIOD
        tl.store(
            seat_decays + chunk_offsets,
            _sums_of_logs(seat_decays, log, chunk_offsets < index, chunk_offsets, index),
            mask=new,
        )


def delta(
    mixed_rows: torch.Tensor,
    gates: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Computes what `reference.delta.delta` computes."""
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
    keep_arguments = (*inputs, states.keys, states.decays, *sequences, *shape[:3], sizes.channels)
    launch(_keep, grid[:2], *keep_arguments, **wide, **common)
    return out
