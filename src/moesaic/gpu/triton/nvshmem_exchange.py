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
    PE,
    REQUEST,
    REQUEST_WORD,
    THERE,
    THERE_WORD,
    TOLD_ANSWER,
    TOLD_DOUBT,
    TOLD_HEADER,
    Exchange,
)
from moesaic.gpu.triton import nvshmem
from moesaic.gpu.triton.exchange import WIDE, collect
from moesaic.gpu.triton.launching import block, launch

__all__ = ["collect", "dispatch", "post", "wait"]
SCAN = 64
"""Rows whose experts a program reads at a time."""
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_PE, _THERE, _THERE_WORD = tl.constexpr(PE), tl.constexpr(THERE), tl.constexpr(THERE_WORD)
_REQUEST, _ANSWERS = tl.constexpr(REQUEST), tl.constexpr(ANSWERS)
_REQUEST_WORD, _ANSWER_WORD = tl.constexpr(REQUEST_WORD), tl.constexpr(ANSWER_WORD)
_HEADER, _TOLD, _DOUBT = tl.constexpr(TOLD_HEADER), tl.constexpr(TOLD_ANSWER), tl.constexpr(TOLD_DOUBT)


@triton.jit
def _rows_at(pairs, rows, WORDS: tl.constexpr):
    """Bytes from the begin of a request to its rows."""
    return tl.cdiv(4 * (WORDS + 2 * pairs + rows), _ALIGNMENT) * _ALIGNMENT


@triton.jit
def _of_slot(ids, table, slot, at, rows, K: tl.constexpr, KS: tl.constexpr):
    """[b, k] the experts of these rows, and whether each is in this slot."""
    each = tl.arange(0, KS)[None, :]
    there = (at[:, None] < rows) & (each < K)
    expert = tl.load(ids + at[:, None] * K + each, mask=there, other=0)
    server = tl.load(table + expert, mask=there, other=-1)
    return expert.to(tl.int32), (server == slot).to(tl.int32)


@triton.jit
def _write_header(
    words, header, rows, pairs, WORDS: tl.constexpr, ROWS_AT: tl.constexpr, PAIRS_AT: tl.constexpr
):
    each = tl.arange(0, 8)
    numbers = tl.load(header + each, mask=each < WORDS, other=0)
    numbers = tl.where(each == ROWS_AT, rows, tl.where(each == PAIRS_AT, pairs, numbers))
    tl.store(words + each, numbers, mask=each < WORDS)


@triton.jit
def _write(
    ids, table, header, addresses, sources, asked, lines, step, width, most,
    K: tl.constexpr, KS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, ROWS_AT: tl.constexpr,
    PAIRS_AT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """One program a slot."""
    slot = tl.program_id(0)
    request = tl.load(addresses + _REQUEST * SLOTS + slot)
    live = tl.where(tl.load(step + 1) == 0, tl.load(step), 0)
    live = tl.where(request != 0, live, 0)
    lines += slot * (most + 1)
    pairs, rows = 0, 0
    for begin in range(0, live, SCAN):
        _, mine = _of_slot(ids, table, slot, begin + tl.arange(0, SCAN), live, K, KS)
        of_row = tl.sum(mine, 1)
        pairs += tl.sum(of_row, 0)
        rows += tl.sum((of_row > 0).to(tl.int32), 0)
    tl.store(asked + slot, pairs)
    tl.store(lines + most, rows)
    if pairs > 0:
        words = request.to(tl.pointer_type(tl.int32))
        told = tl.load(addresses + _HEADER * SLOTS + slot).to(tl.pointer_type(tl.int32))
        _write_header(words, header, rows, pairs, WORDS, ROWS_AT, PAIRS_AT)
        _write_header(told, header, rows, pairs, WORDS, ROWS_AT, PAIRS_AT)
        answers = tl.load(addresses + _ANSWERS * SLOTS + slot)
        each = tl.arange(0, KS)[None, :]
        pair, line = 0, 0
        for begin in range(0, live, SCAN):
            at = begin + tl.arange(0, SCAN)
            expert, mine = _of_slot(ids, table, slot, at, live, K, KS)
            of_row = tl.sum(mine, 1)
            used = (of_row > 0).to(tl.int32)
            mine_line = line + tl.cumsum(used, 0) - used
            place = (pair + tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(mine, 1) - mine
            tl.store(words + WORDS + place, expert, mask=mine > 0)
            tl.store(words + WORDS + pairs + place, mine_line[:, None] + tl.zeros_like(place), mask=mine > 0)
            where = answers + place.to(tl.int64) * width * 4
            tl.store(sources + at[:, None] * K + each, where, mask=mine > 0)
            tl.store(lines + at, mine_line, mask=used > 0)
            pair += tl.sum(of_row, 0)
            line += tl.sum(used, 0)
        for begin in range(0, rows, SCAN):
            at = begin + tl.arange(0, SCAN)
            tl.store(words + WORDS + 2 * pairs + at, at, mask=at < rows)


@triton.jit
def _gather(
    hidden, ids, table, addresses, sources, asked, lines, step, sequence, width, most,
    K: tl.constexpr, KS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, which goes to each slot of its experts once. The first one counts the request."""
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(sequence, tl.load(sequence) + 1)
    live = tl.where(tl.load(step + 1) == 0, tl.load(step), 0)
    each = tl.arange(0, KS)
    expert = tl.load(ids + row * K + each, mask=each < K, other=0)
    slots = tl.load(table + expert, mask=each < K, other=-1)
    requests = tl.load(addresses + _REQUEST * SLOTS + slots, mask=slots >= 0, other=0)
    nobody = requests * (row < live).to(tl.int64) == 0
    tl.store(sources + row * K + each, tl.zeros([KS], tl.int64), mask=(each < K) & nobody)
    if row < live:
        for k in range(K):
            slot = tl.sum(tl.where(each == k, slots, 0), 0)
            request = tl.sum(tl.where(each == k, requests, 0), 0)
            before = tl.sum(((slots == slot) & (each < k)).to(tl.int32), 0)
            if (request != 0) & (before == 0):
                of_slot = lines + slot * (most + 1)
                pairs, rows, line = tl.load(asked + slot), tl.load(of_slot + most), tl.load(of_slot + row)
                begins = request + _rows_at(pairs, rows, WORDS)
                target = begins.to(tl.pointer_type(tl.float32)) + line.to(tl.int64) * width
                for begin in range(0, width, BLOCK):
                    at = begin + tl.arange(0, BLOCK)
                    numbers = tl.load(hidden + row * width + at, mask=at < width, other=0.0)
                    tl.store(target + at, numbers, mask=at < width)


@triton.jit
def _send(addresses, asked, lines, step, sequence, width, most, SLOTS: tl.constexpr, WORDS: tl.constexpr):
    """One program a slot."""
    slot = tl.program_id(0)
    pairs = tl.load(asked + slot) * (1 - tl.load(step + 1))
    if pairs > 0:
        number, rows = tl.load(sequence), tl.load(lines + slot * (most + 1) + most)
        told = tl.load(addresses + _REQUEST_WORD * SLOTS + slot).to(tl.pointer_type(tl.int64))
        tl.atomic_store(told, number, sem="release", scope="sys")
        size = _rows_at(pairs, rows, WORDS).to(tl.int64) + rows.to(tl.int64) * width * 4
        source = tl.load(addresses + _REQUEST * SLOTS + slot)
        target = tl.load(addresses + _THERE * SLOTS + slot)
        word = tl.load(addresses + _THERE_WORD * SLOTS + slot)
        nvshmem.put_signal(target, source, size, word, number, tl.load(addresses + _PE * SLOTS + slot))


@triton.jit
def _answered(addresses, asked, step, sequence, abort, polls, SLOTS: tl.constexpr):
    """One program: until the answer words of all slots that have pairs are there.

    The step has failed if it was told to stop before, or has looked `polls` times.
    """
    each = tl.arange(0, SLOTS)
    number, failed = tl.load(sequence), tl.load(step + 1)
    posted = tl.load(asked + each) * (1 - failed) > 0
    words = tl.where(posted, tl.load(addresses + _ANSWER_WORD * SLOTS + each), 0)
    words = tl.where(posted, words, tl.max(words, 0))  # every thread has to look somewhere in the heap
    numbers = tl.where(posted, 2 * number, 0)
    answers = tl.load(addresses + _TOLD * SLOTS + each).to(tl.pointer_type(tl.int64))
    doubts = tl.load(addresses + _DOUBT * SLOTS + each).to(tl.pointer_type(tl.int64))
    told = tl.load(abort).to(tl.pointer_type(tl.int64))
    left, open_ = polls + 0, posted
    missing = tl.sum(open_.to(tl.int32), 0)
    tl.debug_barrier()  # every thread has read whether the step has failed
    while (missing > 0) & (left > 0):
        here = nvshmem.at_least(words, numbers) & open_
        doubtful = tl.load(words.to(tl.pointer_type(tl.int64)), mask=here, other=0, volatile=True) & 1
        tl.store(doubts, tl.full([SLOTS], 1, tl.int64), mask=here & (doubtful == 1))
        tl.atomic_store(answers, number + tl.zeros([SLOTS], tl.int64), mask=here, sem="release", scope="sys")
        open_ = open_ & (here == 0)
        missing = tl.sum(open_.to(tl.int32), 0)
        left = tl.where(tl.load(told, volatile=True) == 0, left - 1, 0)
    if missing > 0:
        tl.store(step + 1, 1)


def dispatch(exchange: Exchange, index: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Put together what each server gets of a layer. Nothing is sent yet. See `ExchangeOperations`."""
    hidden, ids, (count, top_k) = hidden.contiguous(), ids.contiguous(), ids.shape
    sources = torch.empty(count * top_k, dtype=torch.int64, device=hidden.device)
    width, header, most = hidden.shape[1], exchange.headers[index], exchange.lines.shape[1] - 1
    table, asked, ks = exchange.table[index], exchange.asked[index], block(top_k)
    sizes = {"K": top_k, "KS": ks, "SLOTS": exchange.slots, "WORDS": len(header)}
    launch(
        _write,
        (exchange.slots,),
        ids,
        table,
        header,
        exchange.addresses,
        sources,
        asked,
        exchange.lines,
        exchange.step,
        width,
        most,
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
        asked,
        exchange.lines,
        exchange.step,
        exchange.sequence,
        width,
        most,
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
        exchange.asked[index],
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
    given = exchange.addresses, exchange.asked[index], exchange.step, exchange.sequence, exchange.abort
    nvshmem.launch(_answered, (1,), *given, polls, SLOTS=exchange.slots, num_warps=1)
