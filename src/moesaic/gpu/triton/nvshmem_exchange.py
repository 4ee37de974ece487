"""Rows to expert servers of any host and their answers back, by launches alone. GPUs send them by NVSHMEM.

Each server has a slot. What goes to it is put together in the own heap, and sent as one: a request, then the
rows that it needs and no others.

    write      each server's request, and which rows it gets
    gather     these rows behind the request
    post       sends each server what was put together, and behind it the next sequence number
    wait       spins until all answers are there, or the step has failed
    collect    the answers by pair

A server's answer word is twice the number of the request, plus one if it has doubts about its numbers. The
host is told meanwhile what was asked and answered, in memory of its own.

See `gpu.triton.exchange` for what holds there too: launches of one stream are ordered, nothing is read
back, and no launch has an argument that changes.

Question: How does a CUDA graph ask servers of other hosts (`--transport nvshmem`)?
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.exchange.exchange_launches import (
    ALIGNMENT,
    ANSWER_WORD,
    ANSWERS,
    HOST_ANSWER,
    HOST_DOUBT,
    HOST_HEADER,
    PE,
    REMOTE_REQUEST,
    REMOTE_WORD,
    REQUEST,
    REQUEST_WORD,
    Exchange,
)
from moesaic.gpu.triton import nvshmem
from moesaic.gpu.triton.exchange import WIDE, collect
from moesaic.gpu.triton.launching import block, launch

__all__ = ["collect", "dispatch", "post", "wait"]
SCAN = 64
"""Rows whose experts a program reads at a time."""
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_PE, _REMOTE_REQUEST, _REMOTE_WORD = tl.constexpr(PE), tl.constexpr(REMOTE_REQUEST), tl.constexpr(REMOTE_WORD)
_REQUEST, _ANSWERS = tl.constexpr(REQUEST), tl.constexpr(ANSWERS)
_REQUEST_WORD, _ANSWER_WORD = tl.constexpr(REQUEST_WORD), tl.constexpr(ANSWER_WORD)
_HOST_HEADER, _HOST_ANSWER, _HOST_DOUBT = (
    tl.constexpr(HOST_HEADER),
    tl.constexpr(HOST_ANSWER),
    tl.constexpr(HOST_DOUBT),
)


@triton.jit
def _rows_at(pairs, rows, WORDS: tl.constexpr):
    """Bytes from the begin of a request to its rows."""
    return tl.cdiv(4 * (WORDS + 2 * pairs + rows), _ALIGNMENT) * _ALIGNMENT


@triton.jit
def _of_slot(ids, table, slot, row_offsets, rows, K: tl.constexpr, KS: tl.constexpr):
    """[b, k] the experts of these rows, and whether each is in this slot."""
    k_offsets = tl.arange(0, KS)[None, :]
    mask = (row_offsets[:, None] < rows) & (k_offsets < K)
    expert = tl.load(ids + row_offsets[:, None] * K + k_offsets, mask=mask, other=0)
    server = tl.load(table + expert, mask=mask, other=-1)
    return expert.to(tl.int32), (server == slot).to(tl.int32)


@triton.jit
def _write_header(
    words, header, rows, pairs, WORDS: tl.constexpr, ROWS_AT: tl.constexpr, PAIRS_AT: tl.constexpr
):
    word_offsets = tl.arange(0, 8)
    numbers = tl.load(header + word_offsets, mask=word_offsets < WORDS, other=0)
    numbers = tl.where(word_offsets == ROWS_AT, rows, tl.where(word_offsets == PAIRS_AT, pairs, numbers))
    tl.store(words + word_offsets, numbers, mask=word_offsets < WORDS)


@triton.jit
def _write(
    ids, table, header, addresses, sources, pair_counts, lines, step, width, max_rows,
    K: tl.constexpr, KS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, ROWS_AT: tl.constexpr,
    PAIRS_AT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Each program serves one slot."""
    slot = tl.program_id(0)
    request = tl.load(addresses + _REQUEST * SLOTS + slot)
    live = tl.where(tl.load(step + 1) == 0, tl.load(step), 0)
    live = tl.where(request != 0, live, 0)
    lines += slot * (max_rows + 1)
    pairs, rows = 0, 0
    for begin in range(0, live, SCAN):
        _, in_slot = _of_slot(ids, table, slot, begin + tl.arange(0, SCAN), live, K, KS)
        of_row = tl.sum(in_slot, 1)
        pairs += tl.sum(of_row, 0)
        rows += tl.sum((of_row > 0).to(tl.int32), 0)
    tl.store(pair_counts + slot, pairs)
    tl.store(lines + max_rows, rows)
    if pairs > 0:
        words = request.to(tl.pointer_type(tl.int32))
        host_words = tl.load(addresses + _HOST_HEADER * SLOTS + slot).to(tl.pointer_type(tl.int32))
        _write_header(words, header, rows, pairs, WORDS, ROWS_AT, PAIRS_AT)
        _write_header(host_words, header, rows, pairs, WORDS, ROWS_AT, PAIRS_AT)
        answers = tl.load(addresses + _ANSWERS * SLOTS + slot)
        k_offsets = tl.arange(0, KS)[None, :]
        pair, line = 0, 0
        for begin in range(0, live, SCAN):
            row_offsets = begin + tl.arange(0, SCAN)
            expert, in_slot = _of_slot(ids, table, slot, row_offsets, live, K, KS)
            of_row = tl.sum(in_slot, 1)
            has_pairs = (of_row > 0).to(tl.int32)
            row_lines = line + tl.cumsum(has_pairs, 0) - has_pairs
            place = (pair + tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(in_slot, 1) - in_slot
            tl.store(words + WORDS + place, expert, mask=in_slot > 0)
            tl.store(
                words + WORDS + pairs + place, row_lines[:, None] + tl.zeros_like(place), mask=in_slot > 0
            )
            answer_addresses = answers + place.to(tl.int64) * width * 4
            tl.store(sources + row_offsets[:, None] * K + k_offsets, answer_addresses, mask=in_slot > 0)
            tl.store(lines + row_offsets, row_lines, mask=has_pairs > 0)
            pair += tl.sum(of_row, 0)
            line += tl.sum(has_pairs, 0)
        for begin in range(0, rows, SCAN):
            row_offsets = begin + tl.arange(0, SCAN)
            tl.store(words + WORDS + 2 * pairs + row_offsets, row_offsets, mask=row_offsets < rows)


@triton.jit
def _gather(
    hidden, ids, table, addresses, sources, pair_counts, lines, step, sequence, width, max_rows,
    K: tl.constexpr, KS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program copies one row once to each slot of its experts. The first one counts the request."""
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(sequence, tl.load(sequence) + 1)
    live = tl.where(tl.load(step + 1) == 0, tl.load(step), 0)
    k_offsets = tl.arange(0, KS)
    expert = tl.load(ids + row * K + k_offsets, mask=k_offsets < K, other=0)
    slots = tl.load(table + expert, mask=k_offsets < K, other=-1)
    requests = tl.load(addresses + _REQUEST * SLOTS + slots, mask=slots >= 0, other=0)
    has_no_server = requests * (row < live).to(tl.int64) == 0
    tl.store(sources + row * K + k_offsets, tl.zeros([KS], tl.int64), mask=(k_offsets < K) & has_no_server)
    if row < live:
        for k in range(K):
            slot = tl.sum(tl.where(k_offsets == k, slots, 0), 0)
            request = tl.sum(tl.where(k_offsets == k, requests, 0), 0)
            earlier_choices = tl.sum(((slots == slot) & (k_offsets < k)).to(tl.int32), 0)
            if (request != 0) & (earlier_choices == 0):
                of_slot = lines + slot * (max_rows + 1)
                pairs, rows, line = (
                    tl.load(pair_counts + slot),
                    tl.load(of_slot + max_rows),
                    tl.load(of_slot + row),
                )
                begins = request + _rows_at(pairs, rows, WORDS)
                target = begins.to(tl.pointer_type(tl.float32)) + line.to(tl.int64) * width
                for begin in range(0, width, BLOCK):
                    columns = begin + tl.arange(0, BLOCK)
                    numbers = tl.load(hidden + row * width + columns, mask=columns < width, other=0.0)
                    tl.store(target + columns, numbers, mask=columns < width)


@triton.jit
def _send(
    addresses, pair_counts, lines, step, sequence, width, max_rows, SLOTS: tl.constexpr, WORDS: tl.constexpr
):
    """Each program serves one slot."""
    slot = tl.program_id(0)
    pairs = tl.load(pair_counts + slot) * (1 - tl.load(step + 1))
    if pairs > 0:
        number, rows = tl.load(sequence), tl.load(lines + slot * (max_rows + 1) + max_rows)
        host_word = tl.load(addresses + _REQUEST_WORD * SLOTS + slot).to(tl.pointer_type(tl.int64))
        tl.atomic_store(host_word, number, sem="release", scope="sys")
        size = _rows_at(pairs, rows, WORDS).to(tl.int64) + rows.to(tl.int64) * width * 4
        source = tl.load(addresses + _REQUEST * SLOTS + slot)
        target = tl.load(addresses + _REMOTE_REQUEST * SLOTS + slot)
        word = tl.load(addresses + _REMOTE_WORD * SLOTS + slot)
        nvshmem.put_signal(target, source, size, word, number, tl.load(addresses + _PE * SLOTS + slot))


@triton.jit
def _wait(addresses, pair_counts, step, sequence, abort, polls, SLOTS: tl.constexpr):
    """A single program waits until the answer words of all slots that have pairs have arrived.

    The step has failed if it was told to stop before, or has looked `polls` times.
    """
    slot_offsets = tl.arange(0, SLOTS)
    number, has_failed = tl.load(sequence), tl.load(step + 1)
    is_posted = tl.load(pair_counts + slot_offsets) * (1 - has_failed) > 0
    words = tl.where(is_posted, tl.load(addresses + _ANSWER_WORD * SLOTS + slot_offsets), 0)
    words = tl.where(is_posted, words, tl.max(words, 0))  # every thread has to look somewhere in the heap
    numbers = tl.where(is_posted, 2 * number, 0)
    answers = tl.load(addresses + _HOST_ANSWER * SLOTS + slot_offsets).to(tl.pointer_type(tl.int64))
    doubts = tl.load(addresses + _HOST_DOUBT * SLOTS + slot_offsets).to(tl.pointer_type(tl.int64))
    abort_word = tl.load(abort).to(tl.pointer_type(tl.int64))
    left, open_ = polls + 0, is_posted
    missing = tl.sum(open_.to(tl.int32), 0)
    tl.debug_barrier()  # every thread has read whether the step has failed
    while (missing > 0) & (left > 0):
        has_arrived = nvshmem.at_least(words, numbers) & open_
        doubtful = tl.load(words.to(tl.pointer_type(tl.int64)), mask=has_arrived, other=0, volatile=True) & 1
        tl.store(doubts, tl.full([SLOTS], 1, tl.int64), mask=has_arrived & (doubtful == 1))
        tl.atomic_store(
            answers, number + tl.zeros([SLOTS], tl.int64), mask=has_arrived, sem="release", scope="sys"
        )
        open_ = open_ & (has_arrived == 0)
        missing = tl.sum(open_.to(tl.int32), 0)
        left = tl.where(tl.load(abort_word, volatile=True) == 0, left - 1, 0)
    if missing > 0:
        tl.store(step + 1, 1)


def dispatch(exchange: Exchange, index: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Put together what each server gets of a layer. Nothing is sent yet. See `ExchangeOperations`."""
    hidden, ids, (count, top_k) = hidden.contiguous(), ids.contiguous(), ids.shape
    sources = torch.empty(count * top_k, dtype=torch.int64, device=hidden.device)
    width, header, max_rows = hidden.shape[1], exchange.headers[index], exchange.lines.shape[1] - 1
    table, pair_counts, ks = exchange.table[index], exchange.pair_counts[index], block(top_k)
    sizes = {"K": top_k, "KS": ks, "SLOTS": exchange.slots, "WORDS": len(header)}
    launch(
        _write,
        (exchange.slots,),
        ids,
        table,
        header,
        exchange.addresses,
        sources,
        pair_counts,
        exchange.lines,
        exchange.step,
        width,
        max_rows,
        **sizes,
        ROWS_AT=exchange.rows_at,
        PAIRS_AT=exchange.pairs_at,
        SCAN=min(SCAN, block(count)),
    )
    launch(
        _gather,
        (count,),
        hidden,
        ids,
        table,
        exchange.addresses,
        sources,
        pair_counts,
        exchange.lines,
        exchange.step,
        exchange.sequence,
        width,
        max_rows,
        **sizes,
        BLOCK=min(WIDE, block(width)),
    )
    return sources


def post(exchange: Exchange, index: int) -> None:
    """Send to the servers that have pairs of this layer."""
    nvshmem.launch(
        _send,
        (exchange.slots,),
        exchange.addresses,
        exchange.pair_counts[index],
        exchange.lines,
        exchange.step,
        exchange.sequence,
        exchange.rows.shape[1],
        exchange.lines.shape[1] - 1,
        SLOTS=exchange.slots,
        WORDS=exchange.headers.shape[1],
    )


def wait(exchange: Exchange, index: int, polls: int) -> None:
    """Wait for the answers to this layer's requests. polls: how often it looks before the step has failed."""
    arguments = (
        exchange.addresses,
        exchange.pair_counts[index],
        exchange.step,
        exchange.sequence,
        exchange.abort,
    )
    nvshmem.launch(_wait, (1,), *arguments, polls, SLOTS=exchange.slots, num_warps=1)
