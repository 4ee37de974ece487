"""Adds up what processes have counted, so that no total ever decreases when a process ends or leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import TypeVar

from moesaic.core.metrics import ExpertServerStats, StateStats, WorkerStats

Record = TypeVar("Record", WorkerStats, ExpertServerStats)


@dataclass(frozen=True)
class PastMembers:
    """What remains of members that have left."""

    deaths: int = 0
    server_stats: ExpertServerStats = field(default_factory=ExpertServerStats)
    """Counts of the expert servers among them."""


def sum_stats(records: Sequence[Record]) -> Record:
    """Returns the sum of records, field by field, including nested records."""

    def add(parts: list[object]) -> object:
        first = parts[0]
        if isinstance(first, int | float):
            return sum(parts)  # type: ignore[arg-type]
        if isinstance(first, tuple):  # one number for each layer, or none yet
            return tuple(map(sum, zip_longest(*parts, fillvalue=0)))  # type: ignore[call-overload]
        names = [number.name for number in fields(first)]  # type: ignore[arg-type]
        return type(first)(**{name: add([getattr(part, name) for part in parts]) for name in names})

    result = add(list(records))
    assert isinstance(result, type(records[0]))
    return result


def server_counters_only(stats: ExpertServerStats) -> ExpertServerStats:
    """Returns the part of an expert server's statistics that outlives it: counts, but no state."""
    return replace(stats, clients=0, waiting_pairs=0)


def counters_only(stats: WorkerStats) -> WorkerStats:
    """Returns the part of a worker's statistics that outlives it: counts, but no state."""
    return replace(
        stats,
        running=0,
        waiting=0,
        blocks=replace(stats.blocks, num_total=0, num_free=0, num_cached=0, num_used=0),
        states=StateStats(),
        experts=replace(
            stats.experts,
            plan=replace(stats.experts.plan, micro_batch=0, listed_experts=0, resident_experts=0),
        ),
        speculation=replace(stats.speculation, prices=()),
        transfers=replace(stats.transfers, held_bytes=0),
    )
