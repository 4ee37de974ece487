"""How many rows make it efficient to read the weights of the experts.

A run reads the weights of every expert that some row chose, once for all of its rows. With few rows per
expert, reading takes most of the time. Then two runs take twice as long as one run of the rows of both.

On CPUs, computing takes as long as reading at 5 to 10 rows per expert. This holds for two bytes a weight at
12 to 28 GB/s, and for two flops a weight at 80 to 140 Gflop/s.
"""

from __future__ import annotations

SHARED_ROWS = 6
"""Rows per expert at which reading takes about half of a run. Sharing a run pays below this, not above."""
SEPARATE_ROWS = 64
"""Rows per expert at which reading takes about a tenth of a run. From here on, a separate run costs little.
"""


def pairs(experts: int) -> int:
    """The (row, expert) pairs from which a run of `experts` experts need not wait for others.

    Example: 32 experts, 192 pairs.
    """
    return SHARED_ROWS * experts


def rows(experts: int, top_k: int) -> int:
    """The rows of one worker from which a run need not wait for other rows.

    Example: 64 experts with top_k 8, 512 rows.
    """
    return -(-SEPARATE_ROWS * experts // top_k)
