"""When a run of the experts is worth the weights that are read for it.

A run reads the weights of every expert that some row chose, once for all of its rows. With few rows each it
takes as long as that reading, whatever their number, and two such runs take twice as long as one of both. On
CPUs computing takes as long as reading with 5 to 10 rows an expert (two bytes a weight at 12 to 28 GB/s, two
flops at 80 to 140 Gflop/s).
"""

from __future__ import annotations

HALF = 6
"""Rows of each expert with which about half of a run is reading: to share it pays below, not above."""
LITTLE = 64
"""... with which a tenth is, so that rows that do not wait for others of their batch lose little."""


def pairs(experts: int) -> int:
    """(row, expert) pairs of a run of so many experts that is worth its reading. Example: 32 experts, 192."""
    return HALF * experts


def rows(experts: int, top_k: int) -> int:
    """Rows of one worker that may as well go on without others. Example: 64 experts, 8 a row: 512 rows."""
    return -(-LITTLE * experts // top_k)
