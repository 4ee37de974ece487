"""Rows to expert servers and their answers back, by launches alone: the host does nothing between them.

Each server has a slot. A slot has a mailbox in memory of the host, which server and device both see: a
request, a word that says when there is one, and a word that says when it was answered. Hidden rows and
answers are in memory of this device, which the servers' devices see as well.

    dispatch   the rows into the shared rows, and each server's request into its mailbox
    post       the next sequence number into the request word of each server that has pairs, with release
    wait       spins until all of their answer words have it, with acquire; else the step has failed
    collect    the answers by pair

Launches of one stream are ordered, so nothing that `dispatch` wrote comes after a word of `post`. Nothing is
read back, and no launch has an argument that changes, so a CUDA graph can hold them all. A step that has
failed posts nothing more. The order of pairs is that of their numbers, and there are no atomic updates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.exchange.exchange_launches import Exchange
from moesaic.gpu.triton.launching import block, launch

IS_SUPPORTED = hasattr(tl, "atomic_load") and hasattr(tl, "atomic_store")
"""Whether this Triton has loads and stores with an order that other devices and the host see."""
SCAN = 1024
"""Pairs that a program reads at a time."""
WIDE = 1024
"""Numbers of a row that a program copies at a time."""


@triton.jit
def _of_slot(ids, table, slot, pair_offsets, pairs):
    """The experts of these pairs, and whether each is in this slot."""
    expert = tl.load(ids + pair_offsets, mask=pair_offsets < pairs, other=0)
    server = tl.load(table + expert, mask=pair_offsets < pairs, other=-1)
    return expert.to(tl.int32), (server == slot).to(tl.int32)


@triton.jit
def _write_request(
    ids, table, header, addresses, sources, pair_counts, live, slot, width,
    K: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, ROWS_AT: tl.constexpr, PAIRS_AT: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    request = tl.load(addresses + slot)
    pairs = tl.where(request != 0, live * K, 0)
    pair_count = 0
    for begin in range(0, pairs, SCAN):
        _, in_slot = _of_slot(ids, table, slot, begin + tl.arange(0, SCAN), pairs)
        pair_count += tl.sum(in_slot, 0)
    tl.store(pair_counts + slot, pair_count)
    if pair_count > 0:
        words = request.to(tl.pointer_type(tl.int32))
        word_offsets = tl.arange(0, 8)
        numbers = tl.load(header + word_offsets, mask=word_offsets < WORDS, other=0)
        numbers = tl.where(
            word_offsets == ROWS_AT, live, tl.where(word_offsets == PAIRS_AT, pair_count, numbers)
        )
        tl.store(words + word_offsets, numbers, mask=word_offsets < WORDS)
        answers = tl.load(addresses + 3 * SLOTS + slot)
        place = 0
        for begin in range(0, pairs, SCAN):
            offsets = begin + tl.arange(0, SCAN)
            expert, in_slot = _of_slot(ids, table, slot, offsets, pairs)
            line = place + tl.cumsum(in_slot, 0) - in_slot
            tl.store(words + WORDS + line, expert, mask=in_slot > 0)
            tl.store(words + WORDS + pair_count + line, offsets // K, mask=in_slot > 0)
            tl.store(sources + offsets, answers + line.to(tl.int64) * width * 4, mask=in_slot > 0)
            place += tl.sum(in_slot, 0)
        for begin in range(0, live, SCAN):
            offsets = begin + tl.arange(0, SCAN)
            tl.store(words + WORDS + 2 * pair_count + offsets, offsets, mask=offsets < live)


@triton.jit
def _write_row(
    hidden, ids, table, addresses, shared_rows, sources, live, row, width,
    K: tl.constexpr, SLOTS: tl.constexpr, KS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k_offsets = tl.arange(0, KS)
    expert = tl.load(ids + row * K + k_offsets, mask=k_offsets < K, other=0)
    slot = tl.load(table + expert, mask=k_offsets < K, other=-1)
    request = tl.load(addresses + slot, mask=slot >= 0, other=0)
    has_no_server = request * (row < live).to(tl.int64) == 0
    tl.store(sources + row * K + k_offsets, tl.zeros([KS], tl.int64), mask=(k_offsets < K) & has_no_server)
    if row < live:
        for begin in range(0, width, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            numbers = tl.load(hidden + row * width + columns, mask=columns < width, other=0.0)
            tl.store(shared_rows + row * width + columns, numbers, mask=columns < width)


@triton.jit
def _dispatch(
    hidden, ids, table, header, addresses, shared_rows, sources, pair_counts, step, width,
    K: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, ROWS_AT: tl.constexpr, PAIRS_AT: tl.constexpr,
    SCAN: tl.constexpr, KS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs serve one slot each, and each of the others copies one row."""
    program = tl.program_id(0)
    live = tl.where(tl.load(step + 1) == 0, tl.load(step), 0)
    if program < SLOTS:
        _write_request(
            ids, table, header, addresses, sources, pair_counts, live, program, width,
            K, SLOTS, WORDS, ROWS_AT, PAIRS_AT, SCAN,
        )  # fmt: skip
    else:
        row = (program - SLOTS).to(tl.int64)
        _write_row(hidden, ids, table, addresses, shared_rows, sources, live, row, width, K, SLOTS, KS, BLOCK)


@triton.jit
def _post(addresses, pair_counts, step, sequence, SLOTS: tl.constexpr):
    """A single program writes the next number into the request words of the slots that have pairs."""
    slot_offsets = tl.arange(0, SLOTS)
    number, has_failed = tl.load(sequence) + 1, tl.load(step + 1)
    is_posted = tl.load(pair_counts + slot_offsets) * (1 - has_failed) > 0
    words = tl.load(addresses + SLOTS + slot_offsets).to(tl.pointer_type(tl.int64))
    numbers = number + tl.zeros([SLOTS], tl.int64)
    tl.debug_barrier()  # every thread has read the number
    tl.store(sequence, number)
    tl.atomic_store(words, numbers, mask=is_posted, sem="release", scope="sys")


@triton.jit
def _wait(addresses, pair_counts, step, sequence, abort, polls, SLOTS: tl.constexpr):
    """A single program waits until the answer words of all slots that have pairs are the number.

    The step has failed if it was told to stop before, or has looked `polls` times.
    """
    slot_offsets = tl.arange(0, SLOTS)
    number, has_failed = tl.load(sequence), tl.load(step + 1)
    is_posted = tl.load(pair_counts + slot_offsets) * (1 - has_failed) > 0
    words = tl.load(addresses + 2 * SLOTS + slot_offsets).to(tl.pointer_type(tl.int64))
    abort_word = tl.load(abort).to(tl.pointer_type(tl.int64))
    missing, left = tl.sum(is_posted.to(tl.int32), 0), polls + 0
    tl.debug_barrier()  # every thread has read whether the step has failed
    while (missing > 0) & (left > 0):
        has_answered = tl.atomic_load(words, mask=is_posted, sem="acquire", scope="sys") == number
        missing = tl.sum((is_posted & (has_answered == 0)).to(tl.int32), 0)
        left = tl.where(tl.load(abort_word, volatile=True) == 0, left - 1, 0)
    if missing > 0:
        tl.store(step + 1, 1)


@triton.jit
def _collect(sources, out, width, BLOCK: tl.constexpr):
    pair, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + pair)
    answer = source.to(tl.pointer_type(tl.float32))
    numbers = tl.load(answer + columns, mask=columns < tl.where(source == 0, 0, width), other=0.0)
    tl.store(out + pair * width + columns, numbers, mask=columns < width)


def dispatch(exchange: Exchange, index: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Write the rows and the requests of a layer. Nobody is told yet.

    index: place of the layer among those with routed experts. hidden: [n, h] float32. ids: [n, k] int64.
    Returns [n * k] int64: the address of each pair's answer row, 0 for none.
    """
    hidden, (count, top_k) = hidden.contiguous(), ids.shape
    sources = torch.empty(count * top_k, dtype=torch.int64, device=hidden.device)
    width, header = hidden.shape[1], exchange.headers[index]
    launch(
        _dispatch,
        (exchange.slots + count,),
        hidden,
        ids.contiguous(),
        exchange.table[index],
        header,
        exchange.addresses,
        exchange.rows,
        sources,
        exchange.pair_counts[index],
        exchange.step,
        width,
        K=top_k,
        SLOTS=exchange.slots,
        WORDS=len(header),
        ROWS_AT=exchange.rows_at,
        PAIRS_AT=exchange.pairs_at,
        SCAN=min(SCAN, block(count * top_k)),
        KS=block(top_k),
        BLOCK=min(WIDE, block(width)),
    )
    return sources


def post(exchange: Exchange, index: int) -> None:
    """Tell the servers that have pairs of this layer."""
    arguments = exchange.addresses, exchange.pair_counts[index], exchange.step, exchange.sequence
    launch(_post, (1,), *arguments, SLOTS=exchange.slots, num_warps=1)


def wait(exchange: Exchange, index: int, polls: int) -> None:
    """Wait for the answers to this layer's requests. polls: how often it looks before the step has failed."""
    arguments = (
        exchange.addresses,
        exchange.pair_counts[index],
        exchange.step,
        exchange.sequence,
        exchange.abort,
    )
    launch(_wait, (1,), *arguments, polls, SLOTS=exchange.slots, num_warps=1)


def collect(sources: torch.Tensor, top_k: int, width: int) -> torch.Tensor:
    """The answers [n, k, h] float32 of all pairs: 0 where nobody was asked. sources: as of `dispatch`."""
    out = torch.empty(len(sources) // top_k, top_k, width, dtype=torch.float32, device=sources.device)
    size = min(WIDE, block(width))
    launch(_collect, (len(sources), triton.cdiv(width, size)), sources, out, width, BLOCK=size)
    return out
