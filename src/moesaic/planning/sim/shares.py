"""Which pairs of a submission each server gets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.core.tokens import IntArray


class Share(NamedTuple):
    """The pairs of a submission that one server gets."""

    server: int
    pairs: IntArray
    """[p] ascending."""
    experts: IntArray
    """[p] the expert of each."""
    rows: int
    """Number of their rows."""


def by_server(servers: IntArray, pairs: IntArray, experts: IntArray, top_k: int) -> list[Share]:
    """The pairs [n] of each server, by ascending servers. servers, experts: [n] of each pair.

    Example: top-2, pairs 0 1 2 3 with servers 5 5 3 5 -> server 3 has pair 2, and server 5 has pairs 0 1 3 of
    two rows.
    """
    if not len(pairs):
        return []
    order = np.argsort(servers, kind="stable")
    sorted_servers, sorted_pairs, sorted_experts = servers[order], pairs[order], experts[order]
    is_new_server = sorted_servers[1:] != sorted_servers[:-1]
    row, first = sorted_pairs // top_k, np.ones(len(sorted_pairs), dtype=np.int64)
    first[1:] = is_new_server | (row[1:] != row[:-1])
    starts = np.concatenate([[0], np.flatnonzero(is_new_server) + 1])
    rows, numbers, bounds = (
        np.add.reduceat(first, starts).tolist(),
        sorted_servers[starts].tolist(),
        starts.tolist(),
    )
    ends = [*bounds[1:], len(sorted_pairs)]
    return [
        Share(server, sorted_pairs[begin:end], sorted_experts[begin:end], count)
        for server, begin, end, count in zip(numbers, bounds, ends, rows, strict=True)
    ]
