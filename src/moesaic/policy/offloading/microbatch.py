"""Divides requests of different lengths into micro-batches of about equal work.

MoE-Lightning, Algorithm 2, with two corrections. The printed algorithm loses partitions that never fill,
and aborts requests that do not fit. Here every partition becomes a micro-batch, and requests that do not
fit are queued again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divided:
    """Indices of requests, each in one micro-batch or left over."""

    micro_batches: list[list[int]]
    """The micro-batches with requests. In each, the longest prompt comes first."""
    left: list[int]
    """Requests that did not fit, in their old order, for the next batch."""


def divide(
    prompts: Sequence[int], generate: Sequence[int], micro_batches: int, largest: int, cache: int
) -> Divided:
    """Divide the requests: the longest prompt first, each into the open micro-batch with room that has the
    fewest prompt tokens.

    prompts, generate: [n] tokens that each request has, and may generate. largest: maximum requests of a
    micro-batch. cache: tokens that a micro-batch's cache can hold at the end; a longer request is always
    left over. Of equal prompts the earlier comes first, of equal micro-batches the lower one is chosen.

    The printed algorithm tries only the emptiest micro-batch and refuses requests that another one could
    take.

    Example: prompts 5, 9, 3, 8, 4 that generate 2 each, 2 micro-batches of at most 2, cache 17: 9 and 8
    open one each, 5 joins 8 (10 + 7 tokens), 4 joins 9 (11 + 6), and 3 is left: [[1, 4], [3, 0]], left [2].
    """
    room = [cache] * micro_batches
    tokens = [0] * micro_batches
    made: list[list[int]] = [[] for _ in range(micro_batches)]
    left = []
    for place in sorted(range(len(prompts)), key=lambda place: (-prompts[place], place)):
        need = prompts[place] + generate[place]
        open_ones = [i for i in range(micro_batches) if len(made[i]) < largest and need <= room[i]]
        if not open_ones:
            left.append(place)
            continue
        chosen = min(open_ones, key=lambda i: (tokens[i], i))
        made[chosen].append(place)
        tokens[chosen] += prompts[place]
        room[chosen] -= need
    return Divided([one for one in made if one], sorted(left))
