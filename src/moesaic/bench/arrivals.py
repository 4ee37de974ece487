"""When requests are sent, in seconds from the start. Pure."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Arrivals = Literal["poisson", "fixed"]
Seconds = NDArray[np.float64]


def arrival_times(
    count: int, rate: float, rng: np.random.Generator, kind: Arrivals = "poisson", burstiness: float = 1.0
) -> Seconds:
    """`count` ascending times at `rate` requests per second; all 0 when the rate is infinite.

    burstiness: shape of the gamma distribution of the gaps; 1 is Poisson, less comes in bursts, more
    is more even. The gaps are scaled so that the last request comes at count / rate, as vLLM does:
    two seeds then ask for the same rate.

    Example: arrival_times(3, 2.0, rng, "fixed") -> [0.5, 1.0, 1.5]
    """
    if math.isinf(rate):
        return np.zeros(count)
    gaps = np.ones(count) if kind == "fixed" else rng.gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    if not count or times[-1] == 0.0:  # gaps of extreme burstiness are too small for a float
        return np.arange(1, count + 1) / rate
    scaled: Seconds = times / times[-1] * (count / rate)
    return scaled
