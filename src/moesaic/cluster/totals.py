"""Statistics of several workers together."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import zip_longest

from moesaic.core.messages import KVSent, Stats
from moesaic.core.metrics import StateStats, WorkerStats
from moesaic.core.worker_info import WorkerInfo


def merge_infos(infos: list[WorkerInfo]) -> WorkerInfo:
    """Describes workers as one, with the seats and memory of all."""
    names = ("num_blocks", "kv_bytes", "max_num_seqs", "state_bytes", "state_seats", "state_snapshots")
    return replace(infos[0], **{name: sum(getattr(info, name) for info in infos) for name in names})


def counters(stats: WorkerStats) -> WorkerStats:
    """Returns the part of a worker's statistics that outlives it: counts, but no state."""
    return replace(
        stats,
        running=0,
        waiting=0,
        blocks=replace(stats.blocks, total=0, free=0, cached=0, used=0),
        states=StateStats(),
        speculation=replace(stats.speculation, prices=()),
        transfers=replace(stats.transfers, held_bytes=0),
    )


def update_stats(stats: WorkerStats, news: Stats | KVSent) -> WorkerStats:
    """What is known of a worker once it has reported again.

    A prefill worker reports pieces that have arrived from other threads than its steps, so that the newer
    report may come first. It has more bytes.
    """
    transfers = news.stats if isinstance(news, KVSent) else news.stats.transfers
    if transfers.sent_bytes < stats.transfers.sent_bytes:
        transfers = stats.transfers
    return replace(stats if isinstance(news, KVSent) else news.stats, transfers=transfers)


def total(records: list[WorkerStats]) -> WorkerStats:
    """Returns the sum of records, field by field, including nested records."""

    def add(parts: list[object]) -> object:
        first = parts[0]
        if isinstance(first, int | float):
            return sum(parts)  # type: ignore[arg-type]
        if isinstance(first, tuple):  # one number for each layer, or none yet
            return tuple(map(sum, zip_longest(*parts, fillvalue=0)))  # type: ignore[call-overload]
        names = [field.name for field in fields(first)]  # type: ignore[arg-type]
        return type(first)(**{name: add([getattr(part, name) for part in parts]) for name in names})

    result = add(list(records))
    assert isinstance(result, WorkerStats)
    return result
