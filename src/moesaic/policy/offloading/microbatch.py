"""Divides requests of different lengths into micro-batches with about equal work.

The source is MoE-Lightning, Algorithm 2, with two corrections. The printed algorithm loses partitions that
never fill, and aborts requests that do not fit. Here every partition becomes a micro-batch, and requests
that do not fit are queued again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchDivision:
    """The division of requests. Each index is in one micro-batch or left over."""

    micro_batches: list[list[int]]
    """The micro-batches that have requests, as lists of indices. In each, the longest prompt comes first."""
    left: list[int]
    """Indices of requests that did not fit, in their old order, for the next batch."""


def divide(
    prompts: Sequence[int], generate: Sequence[int], micro_batches: int, largest: int, cache: int
) -> BatchDivision:
    """Divide requests into micro-batches, the longest prompt first.

    Each request goes to the open micro-batch that has room for it and the fewest prompt tokens. Of equal
    prompts the earlier comes first; of equal micro-batches the lower one is chosen. The printed algorithm
    tries only the emptiest micro-batch, and refuses requests that another one could take.

    prompts, generate: [n] tokens that each request has, and may generate. largest: maximum number of
    requests in a micro-batch. cache: maximum number of tokens in a micro-batch's cache at the end. A longer
    request is always left over.

    Example: prompts 5, 9, 3, 8, 4 that generate 2 each, 2 micro-batches of at most 2, cache 17. The prompts
    of 9 and 8 open one micro-batch each. 5 joins 8 (10 + 7 tokens), and 4 joins 9 (11 + 6). 3 is left over:
    [[1, 4], [3, 0]], left [2].
    """
    room = [cache] * micro_batches
    tokens = [0] * micro_batches
    micro_batch_lists: list[list[int]] = [[] for _ in range(micro_batches)]
    left = []
    for index in sorted(range(len(prompts)), key=lambda index: (-prompts[index], index)):
        need = prompts[index] + generate[index]
        candidates = [
            i for i in range(micro_batches) if len(micro_batch_lists[i]) < largest and need <= room[i]
        ]
        if not candidates:
            left.append(index)
            continue
        emptiest = min(candidates, key=lambda i: (tokens[i], i))
        micro_batch_lists[emptiest].append(index)
        tokens[emptiest] += prompts[index]
        room[emptiest] -= need
    return BatchDivision([one for one in micro_batch_lists if one], sorted(left))
