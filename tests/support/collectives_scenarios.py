"""The inputs, calls and results of every rank of a group in the conformance suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.packets import FloatArray
from moesaic.experts.collectives.routing import Route, combine_pairs, combine_sums, dispatch

WIDTH, ROWS, TOP_K, EXPERTS = 8, 24, 3, 12
Outcome = dict[str, np.ndarray[Any, Any]]


def rows(rank: int, count: int = ROWS, salt: int = 0) -> FloatArray:
    """Rows [count, WIDTH] of widely different sizes, so that the order of a sum changes its bits."""
    rng = np.random.default_rng([rank, salt])
    scale = 10.0 ** rng.integers(-3, 4, (count, 1))
    found: FloatArray = (rng.standard_normal((count, WIDTH)) * scale).astype(np.float32)
    return found


def sizes(size: int) -> list[int]:
    """Shard sizes. One of three or more shards is empty."""
    return {1: [24], 2: [5, 19], 3: [0, 7, 17], 4: [3, 0, 20, 1]}[size]


def order() -> Any:
    return np.random.default_rng(5).permutation(ROWS)


def route(rank: int, size: int) -> Route:
    """Each rank's own batch. Experts are dealt out to the ranks in turn."""
    rng = np.random.default_rng([rank, 77])
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(ROWS // 2 + rank)])
    return Route(ids, ids % size)


def weights(rank: int, size: int) -> FloatArray:
    found = route(rank, size).expert_ids
    drawn: FloatArray = np.random.default_rng([rank, 78]).random(found.shape).astype(np.float32)
    return drawn


def expert(hidden: FloatArray, ids: Any) -> FloatArray:
    """The answers [p, h] of experts ids [p] for rows [p, h]."""
    answer: FloatArray = np.multiply(hidden, ids[:, None] + 1, dtype=np.float32)
    return answer


def all_reduce(group: Group) -> Outcome:
    return {"sum": group.all_reduce(rows(group.rank))}


def all_reduce_odd(group: Group) -> Outcome:
    return {"sum": group.all_reduce(rows(group.rank, 1)[:, :5])}


def reduce_scatter(group: Group) -> Outcome:
    return {"own": group.reduce_scatter(rows(group.rank))}


def reduce_scatter_v(group: Group) -> Outcome:
    return {"own": group.reduce_scatter(rows(group.rank), sizes(group.size), order())}


def all_gather(group: Group) -> Outcome:
    return {"all": group.all_gather(rows(group.rank, 6))}


def all_gather_v(group: Group) -> Outcome:
    return {"all": group.all_gather(rows(group.rank, sizes(group.size)[group.rank]))}


def there_and_back(group: Group) -> Outcome:
    own = group.reduce_scatter(rows(group.rank), sizes(group.size), order())
    return {"all": group.all_gather(own, order())}


def pairs(group: Group) -> Outcome:
    way = route(group.rank, group.size)
    sent = dispatch(group, way, rows(group.rank, len(way.owners)), weights(group.rank, group.size))
    answers = []
    for packet in sent:
        row, ids = packet.pairs
        answers.append(expert(packet.hidden[row], ids))
    seen = [number for packet in sent for number in packet.rows.tolist()]
    return {"seen": np.array(seen), "answers": combine_pairs(group, way, answers)}


def sums(group: Group) -> Outcome:
    way = route(group.rank, group.size)
    sent = dispatch(group, way, rows(group.rank, len(way.owners)), weights(group.rank, group.size))
    answers = []
    for packet in sent:
        out = np.zeros_like(packet.hidden)
        row, ids = packet.pairs
        weight = packet.weights[np.nonzero(packet.experts >= 0)]
        np.add.at(out, row, weight[:, None] * expert(packet.hidden[row], ids))
        answers.append(out)
    return {"answers": combine_sums(group, way, answers)}


def notes(group: Group) -> Outcome:
    own = np.arange(sizes(group.size)[group.rank]) + 100 * group.rank
    return {"all": group.gather_notes(own, order())}


def message(group: Group) -> Outcome:
    said = [group.announce(b"%d says %d" % (group.rank, turn) * turn) for turn in range(3)]
    return {"said": np.array(said)}


def many(group: Group) -> Outcome:
    """Rounds of all kinds and sizes, one after another. Each must be right."""
    wrong = 0
    for turn in range(300):
        count = turn % 7
        parts = [rows(rank, count, turn) for rank in range(group.size)]
        wrong += not np.array_equal(group.all_reduce(parts[group.rank]), total(parts))
        wrong += not np.array_equal(group.all_gather(parts[group.rank]), np.concatenate(parts))
    return {"wrong": np.array(wrong)}


def total(parts: list[FloatArray]) -> FloatArray:
    """The sum in the order of the ranks."""
    out = parts[0].copy()
    for part in parts[1:]:
        out = out + part
    return out


SCENARIOS: dict[str, Callable[[Group], Outcome]] = {
    one.__name__: one
    for one in (
        *(all_reduce, all_reduce_odd, reduce_scatter, reduce_scatter_v, all_gather, all_gather_v),
        *(there_and_back, pairs, sums, notes, message, many),
    )
}


def run(group: Group) -> Outcome:
    """All scenarios: "scenario/name" -> array, and "scenario/traffic" -> bytes in Traffic's order."""
    found: Outcome = {}
    for name, scenario in SCENARIOS.items():
        before = np.array(dataclasses.astuple(group.traffic))
        found |= {f"{name}/{key}": value.copy() for key, value in scenario(group).items()}
        found[f"{name}/traffic"] = np.array(dataclasses.astuple(group.traffic)) - before
    return found
