"""The times at which requests are sent, in seconds from the start. Pure functions."""

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
    """`count` ascending times at `rate` requests per second; all times are 0 if the rate is infinite.

    burstiness: shape of the gamma distribution of the gaps. 1 is Poisson; smaller values come in bursts,
    larger ones are more even. The gaps are scaled so that the last request comes at count / rate, as in
    vLLM: two seeds then ask for the same rate.

    Example: arrival_times(3, 2.0, rng, "fixed") -> [0.5, 1.0, 1.5]
    """
    if math.isinf(rate):
        return np.zeros(count)
    gaps = np.ones(count) if kind == "fixed" else rng.gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    if not count or times[-1] == 0.0:  # with extreme burstiness the gaps are too small for a float
        return np.arange(1, count + 1) / rate
    scaled_times: Seconds = times / times[-1] * (count / rate)
    return scaled_times
