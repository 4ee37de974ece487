"""Decides when a placement is solved anew from live routing, and whether the result is worth its moves.

Sem-MoE has an online form that solves placement and tables again while it serves. It gives no rule for when.
Ours weighs two predictions, which are both made on requests that the solver did not see:

    gain = horizon * busy * (1 - critical load after / before)          balance, as in `balance.gain_seconds`
         + horizon * tokens/s * (remote bytes before - after) / link    locality, by each link's own speed
    cost = bytes for the busiest server / speed of copies

The placement is swapped if the gain exceeds the cost times a margin. Each term is negative where the new
placement is worse. The horizon is the time for which the routing is assumed to stay as it is.

Question: When does a placement follow live routing (`--rebalance routing`)?
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.policy.placement.balance import gain_seconds

LEAST_REQUESTS = 16
"""Minimum number of recorded requests of a solve."""
LEAST_TOKENS = 1024
"""Minimum number of recorded tokens of a solve."""


@dataclass(frozen=True)
class Forecast:
    """What a placement with its tables does with some requests."""

    local: float
    """Local activation rate: share of (token, expert) pairs on the token's own rank."""
    remote_bytes: float
    """Bytes that a token sends to other ranks and receives from them, over all layers."""
    critical: float
    """Sum over the layers of the largest load / capacity of a server."""
    balancedness: float
    """Mean over the layers of the servers' mean / max load. 1 is perfect."""
    link_seconds: float | None = None
    """Seconds that the remote bytes of a token take, each on its own link. None: all links are alike."""


@dataclass(frozen=True)
class Traffic:
    """What the cluster does now, and how fast its parts are."""

    tokens_per_second: float
    busy: float
    """Mean share of the time in which the servers compute, 0 to 1."""
    link: float
    """Bytes/s between a worker and the server of another rank, where all links are alike."""
    copies: float
    """Bytes/s at which a server loads experts."""
    horizon: float
    """Seconds for which the routing is assumed to stay the same."""
    margin: float = 2.0
    """The gain has to exceed this multiple of the cost."""


@dataclass(frozen=True)
class Verdict:
    """Whether a placement should be swapped."""

    gain: float
    """Predicted seconds that the new placement saves over the horizon."""
    cost: float
    """Predicted seconds that the busiest server needs for its copies."""
    reason: str = ""
    """Why nothing is swapped. Empty: it is."""


def judge(
    old_forecast: Forecast, new_forecast: Forecast, moves: int, move_bytes: int, traffic: Traffic
) -> Verdict:
    """Weigh a new placement against the present one.

    moves: number of copies to load. move_bytes: bytes for the server with the most copies to load.

    Example: the critical load falls by a quarter, servers are busy for 40 % of 300 s, and nothing else
    changes. The gain is 30 s. 8 GiB at 1 GiB/s cost 8 s, so with margin 2 the placement is swapped.
    """
    balance_gain = 1 - new_forecast.critical / old_forecast.critical if old_forecast.critical else 0.0
    saved_seconds = _link_seconds(old_forecast, traffic) - _link_seconds(new_forecast, traffic)
    gain = gain_seconds(balance_gain, traffic.busy, traffic.horizon)
    gain += saved_seconds * traffic.tokens_per_second * traffic.horizon
    gain += 0.0  # -0.0 would be shown with its sign
    cost = move_bytes / traffic.copies
    reason = ""
    if not moves:
        reason = "the solver found the same placement"
    elif gain <= traffic.margin * cost:
        reason = (
            f"a gain of {gain:.3g} s in {traffic.horizon:.0f} s is not more than {traffic.margin:g} times "
            f"the {cost:.3g} s that the moves take"
        )
    return Verdict(gain, cost, reason)


def _link_seconds(forecast: Forecast, traffic: Traffic) -> float:
    """Seconds that the remote bytes of a token take on the links."""
    link_seconds = forecast.link_seconds
    return forecast.remote_bytes / traffic.link if link_seconds is None else link_seconds


class SolveRule:
    """Says when the next solve starts: once an interval, if enough was recorded since the last one."""

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._next = now + interval

    def due(self, now: float, requests: int, tokens: int) -> bool:
        """Whether to solve now. requests, tokens: recorded since the last solve.

        Example: interval 60 from second 0. Second 60 with 3 requests: no. Second 70 with 20 requests of 2000
        tokens: yes, and then not before second 130.
        """
        if now < self._next or requests < LEAST_REQUESTS or tokens < LEAST_TOKENS:
            return False
        self._next = now + self._interval
        return True
