"""Sampling noise that depends on (seed, position) and on nothing else.

A request's tokens therefore never depend on who shares its batch, on preemption or on which worker
computes it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniform(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1), one per (seed, position) pair.

    Each is the SplitMix64 output (Steele, Lea, Flood, OOPSLA 2014) number `position` of the stream
    that starts at a scrambled `seed`.
    """
    with np.errstate(over="ignore"):
        start = _scramble(seeds.astype(np.uint64) + _GOLDEN)
        bits = _scramble(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))
