"""Requests of different lengths into micro-batches of about equal work.

MoE-Lightning, Algorithm 2, with two corrections. As printed it loses partitions that never fill, and aborts
what does not fit: here every partition becomes a micro-batch, and what does not fit is queued again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divided:
    """Places in the list of requests, each in one micro-batch or left over."""

    micro_batches: list[list[int]]
    """Those with requests; within each the longest prompt comes first."""
    left: list[int]
    """What did not fit, in its old order: for the next batch."""


def divide(
    prompts: Sequence[int], generate: Sequence[int], micro_batches: int, largest: int, cache: int
) -> Divided:
    """The longest prompt first, each into the open micro-batch with the fewest prompt tokens that has room.

    prompts, generate: [n] tokens that each request has, and may generate. largest: requests of a micro-batch.
    cache: tokens that a micro-batch's cache holds in the end; a longer request is always left. Of equal
    prompts the earlier comes first, of equal micro-batches the lower.

    The printed algorithm asks only the emptiest one, and turns away what another would have taken.

    Example: prompts 5, 9, 3, 8, 4 that generate 2 each, 2 micro-batches of at most 2, cache 17: 9 and 8 open
    one each, 5 joins 8 (10 + 7 tokens), 4 joins 9 (11 + 6), and 3 is left: [[1, 4], [3, 0]], left [2].
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
