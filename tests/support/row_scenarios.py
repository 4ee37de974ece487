"""The collectives of rows that every rank of a group calls in tests, and what comes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from moesaic.runtime.group.rows import RowCollectives
from tests.support.collectives_scenarios import Outcome, expert, order, route, rows, sizes, weights

Rows = Callable[..., torch.Tensor]
"""Rows as those of `collectives_scenarios`, on the rank's device."""


def all_reduce(group: RowCollectives, mine: Rows) -> Outcome:
    return {"sum": host(group.all_reduce(mine()))}


def all_reduce_odd(group: RowCollectives, mine: Rows) -> Outcome:
    """Numbers that do not divide by the ranks, and fewer of them than ranks."""
    return {"five": host(group.all_reduce(mine(1)[:, :5])), "one": host(group.all_reduce(mine(1)[:, :1]))}


def reduce_scatter(group: RowCollectives, mine: Rows) -> Outcome:
    """One of three or more ranks gets no rows. With all rows for the first rank, too."""
    ranks = group.group.size
    own = group.reduce_scatter(mine(), sizes(ranks))
    first = group.reduce_scatter(mine(6), [6, *[0] * (ranks - 1)])
    return {"own": host(own), "first": host(first)}


def all_gather(group: RowCollectives, mine: Rows) -> Outcome:
    many = sizes(group.group.size)
    return {"all": host(group.all_gather(mine(many[group.group.rank]), many))}


def there_and_back(group: RowCollectives, mine: Rows) -> Outcome:
    many = sizes(group.group.size)
    own = group.reduce_scatter(mine(), many, order())
    return {"own": host(own), "all": host(group.all_gather(own, many, order()))}


def pairs(group: RowCollectives, mine: Rows) -> Outcome:
    rank, size = group.group.rank, group.group.size
    way = route(rank, size)
    arrived = group.dispatch(way, mine(len(way.owners)), weights(rank, size))
    computed = torch.from_numpy(expert(host(arrived.hidden), arrived.experts)).to(arrived.hidden.device)
    answers = group.combine(way, computed, arrived)
    return {"experts": arrived.experts, "counts": np.array(arrived.counts), "answers": host(answers)}


def nothing(group: RowCollectives, mine: Rows) -> Outcome:
    """No rank has a row."""
    none = [0] * group.group.size
    return {"all": host(group.all_gather(mine(0), none)), "sum": host(group.all_reduce(mine(0)))}


def many(group: RowCollectives, mine: Rows) -> Outcome:
    """Rounds of changing sizes, one after another."""
    found = [
        host(one).sum(dtype=np.float64)
        for turn in range(50)
        for one in (
            group.all_reduce(mine(turn % 7, turn)),
            group.all_gather(mine(turn % 7, turn), [turn % 7] * group.group.size),
        )
    ]
    return {"sums": np.array(found)}


def host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


SCENARIOS = (
    all_reduce, all_reduce_odd, reduce_scatter, all_gather, there_and_back, pairs, nothing, many,
)  # fmt: skip


def run(group: RowCollectives, device: str) -> Outcome:
    """All scenarios: "scenario/name" -> array, and "scenario/traffic" -> bytes in Traffic's order."""
    found: Outcome = {}

    def mine(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rows(group.group.rank, *shape)).to(device)

    for scenario in SCENARIOS:
        before = np.array(dataclasses.astuple(group.traffic))
        name = scenario.__name__
        found |= {f"{name}/{key}": value.copy() for key, value in scenario(group, mine).items()}
        found[f"{name}/traffic"] = np.array(dataclasses.astuple(group.traffic)) - before
    return found
