"""What is measured of a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """A latency in seconds, over requests or over tokens."""

    count: int
    mean: float = 0.0
    percentiles: dict[str, float] = field(default_factory=dict)
    """"p50", "p90" and "p99"."""

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """The spread of these values, which may be none."""
        if not len(values):
            return cls(0)
        percentiles = np.percentile(values, PERCENTILES)
        return cls(
            len(values),
            float(np.mean(values)),
            {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)},
        )


@dataclass(frozen=True)
class Sample:
    """The queues at one moment."""

    time: float
    waiting: int
    """Requests that no worker has admitted."""
    running: int
    """Requests that run."""
    pairs: int
    """(row, expert) pairs that wait at servers."""
    tokens_per_second: float
    """Generated tokens per second since the sample before."""


@dataclass(frozen=True)
class CallTimes:
    """Mean seconds of a (row, expert) pair, from the gate until its worker uses the answer."""

    link_out: float = 0.0
    """Seconds on the way to the server, and until the server looks."""
    queue: float = 0.0
    """Seconds in the server's queues."""
    compute: float = 0.0
    link_back: float = 0.0
    """Seconds on the way back, and until the worker looks."""


@dataclass(frozen=True)
class HostLink:
    """What one direction of a link between two hosts carried."""

    size: int
    """Bytes."""
    utilisation: float
    """Share of the time for which something passed."""


@dataclass(frozen=True)
class Figures:
    """The measurement, from the end of the warm-up to the end. Times are in seconds."""

    model: str
    devices: str
    """Where the figures of the devices are from."""
    schedule: str
    seconds: float
    """Length of the measurement."""
    requests: int
    """Requests that arrived in it."""
    completed: int
    """Requests that ended in it."""
    tokens: int
    """Tokens that were generated in it."""
    throughput: float
    """Generated tokens per second."""
    goodput: float | None
    """Requests per second that met the objectives. None without objectives."""
    good_share: float | None
    """Share of the completed requests that met them."""
    queue_seconds: Spread
    """Time from arrival to admission."""
    ttft: Spread
    """Time from arrival to the first token."""
    tpot: Spread
    """Mean time between the tokens of a request."""
    itl: Spread
    """Time between two tokens of a request."""
    in_flight: float
    """Mean number of requests that have arrived and not ended."""
    preemptions: int
    rows_per_run: float
    """Mean rows of an attention run."""
    pairs_per_run: float
    """Mean (row, expert) pairs of an expert run."""
    partial_runs: float | None
    """Share of the workers' runs that computed only some of the rows in flight, with async and auto."""
    call: CallTimes
    utilisation: dict[str, float]
    """Share of the time that each device computed."""
    idle: dict[str, dict[str, float]]
    """Share of the time that each process slept, by what it waited for."""
    link_bytes: dict[str, dict[str, int]]
    """Bytes by sender and receiver."""
    link_utilisation: dict[str, float]
    """Share of the time that each device sent, without links between hosts."""
    host_links: dict[str, dict[str, HostLink]]
    """What went from one host to another. Empty without a topology."""
    expert_load: list[int]
    """Pairs of each server."""
    failovers: int
    """Servers that workers gave up."""
    silent_failovers: int
    """Servers that workers gave up after a timeout."""
    resent_pairs: int
    changes: list[tuple[float, str]]
    """What happened to the servers, and when."""
    samples: list[Sample]
    events: int
    """Events of the simulation."""
