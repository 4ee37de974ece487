"""Estimates how many different experts rows choose together, from recorded rows.

Similar rows choose fewer different experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile

FloatArray = npt.NDArray[np.float64]
LAST = 16
"""Number of tokens used from the end of each request, since decode steps compute rows with a long context."""
REQUESTS = 128
"""Maximum number of recorded requests that are used."""
EXTRAPOLATION = (2, 4, 8, 16, 32, 64)
"""Multiples of the number of recorded requests to which the curve is extrapolated."""


@dataclass(frozen=True)
class Routing:
    """A curve: the share of a layer's experts that rows of different requests choose together."""

    rows: tuple[float, ...]
    """Numbers of rows, from 1, ascending."""
    shares: tuple[float, ...]
    """Shares for these numbers of rows, averaged over the layers."""

    @classmethod
    def from_profile(cls, profile: Profile, experts: int, top_k: float) -> Routing:
        """The routing estimated from the last tokens of a profile's requests.

        experts, top_k: of the model's layers. Raises ConfigError for a profile of another model, or without
        routes.
        """
        routes = profile.routes
        if (profile.num_experts, profile.top_k) != (experts, top_k) or not len(routes.tokens):
            got = f"{routes.requests} requests of {profile.num_experts} experts, {profile.top_k} a token"
            allowed = f"routes of requests with {experts} experts, {top_k:g} a token"
            raise ConfigError.field("profile", got, allowed)
        full = np.flatnonzero(np.diff(routes.starts))
        sampled_requests = full[np.unique(np.linspace(0, len(full) - 1, REQUESTS).astype(int))]
        spans = [
            (max(routes.starts[one], routes.starts[one + 1] - LAST), routes.starts[one + 1])
            for one in sampled_requests
        ]
        return cls.from_rows([routes.experts[begin:end] for begin, end in spans], experts)

    @classmethod
    def from_rows(cls, requests: list[npt.NDArray[np.integer]], experts: int) -> Routing:
        """The routing estimated from recorded rows.

        requests: expert ids [t, layers, k] of each request's rows.
        """
        left = _left(np.stack([_miss_shares(rows, experts) for rows in requests]))
        count = len(requests)
        extrapolated = [left[-1] ** times for times in EXTRAPOLATION]
        shares = [1.0 - float(one.mean()) for one in (*left[1:], *extrapolated)]
        rows = (*range(1, count + 1), *(times * count for times in EXTRAPOLATION))
        return cls(tuple(map(float, rows)), tuple(shares))

    def share(self, rows: float) -> float:
        """The share of a layer's experts that `rows` rows choose together.

        Between two points of the curve it is linear in the logarithm of rows. Less than one row chooses a
        part of what one row does.
        """
        if rows < 1:
            return rows * self.shares[0]
        return float(np.interp(np.log(rows), np.log(self.rows), self.shares))


def _miss_shares(rows: npt.NDArray[np.integer], experts: int) -> FloatArray:
    """[layers, E] share of the rows [t, layers, k] that did not choose each expert."""
    counts = [np.bincount(ids.ravel(), minlength=experts) for ids in rows.swapaxes(0, 1)]
    shares: FloatArray = 1.0 - np.stack(counts) / len(rows)
    return shares


def _left(miss_shares: FloatArray) -> FloatArray:
    """[r + 1, ...] probability that n rows all miss something, from [r, ...] the probability for each
    request's row.

    The n rows are of different requests, since rows of one request are alike. The result is the mean of the
    products over all sets of n requests.

    Example: for 0.5 and 0 it is 1 with no row, 0.25 with one and 0 with both.
    """
    left = np.ones((len(miss_shares) + 1, *miss_shares.shape[1:]))
    for count, one in enumerate(miss_shares, 1):
        weight = (np.arange(1, count + 1) / count).reshape(-1, *[1] * one.ndim)
        left[1 : count + 1] = (1 - weight) * left[1 : count + 1] + weight * one * left[:count]
    return left
