"""What a layout could do at most, by its curves alone: cheap enough to leave out most layouts unseen.

Of n requests for each worker, a layer's runs take at least

    worker   seconds of a run of the worker's rows
    servers  seconds of one run of the fullest server with the rows of all workers together
    step     a worker's run, the way to the servers and back, and a run of the fullest server for it alone

A token of each request takes layers * max(worker, servers, step); on shared devices worker + servers. That
leaves out queues and uneven arrivals, so a real deployment is slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.core.paced_devices import PacedDevices
from moesaic.cost.ops import touched
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.deployment.demand import Demand
from moesaic.planning.deployment.devices import NUMBER_BYTES
from moesaic.planning.deployment.layouts import Layout

MOST_SEQS = 1024
"""Maximum number of requests of a worker that is tried."""
BATCHED_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows of a step that are tried."""


@dataclass(frozen=True)
class Estimate:
    """What a layout could do."""

    layout: Layout
    max_num_seqs: int
    """Requests of a worker at once that give the most tokens within the objective."""
    itl: float
    """Seconds between two tokens of a request then."""
    throughput: float
    """Tokens/s of the cluster then."""
    in_time: bool
    """Whether the objective of --slo itl is met. If not, `seqs` is 1."""
    max_num_batched_tokens: int
    """Rows of the largest step that still takes less than the objective."""
    kv_tokens: int
    """Tokens of a worker's KV cache."""


class Estimates:
    """Estimates the layouts of one model and one demand."""

    def __init__(self, model: ModelSizes, demand: Demand, shares: np.ndarray, itl: float | None) -> None:
        """shares: [layers, E] of the experts' choices. itl: the objective in seconds."""
        self._model = model
        self._demand = demand
        self._shares = shares
        self._itl = itl

    @cached_property
    def _top_k(self) -> float:
        return float(self._demand.routing.top_k or self._model.top_k)

    def estimate(self, layout: Layout, devices: PacedDevices, kv_tokens: int) -> Estimate | None:
        """Estimate a layout with these devices. Returns None if not one request fits into its cache."""
        demand = self._demand
        if kv_tokens < demand.longest:
            return None
        max_seqs = min(MOST_SEQS, int(kv_tokens / (demand.prompt + demand.answer)))
        if demand.workload.clients is not None:
            max_seqs = min(max_seqs, -(-demand.workload.clients // layout.workers))
        step_times = [
            (seqs, self.seconds(layout, devices, seqs)) for seqs in _powers_of_two(max(1, max_seqs))
        ]
        in_time = [step_time for step_time in step_times if self._itl is None or step_time[1] <= self._itl]
        seqs, itl = (
            max(in_time, key=lambda step_time: step_time[0] / step_time[1]) if in_time else step_times[0]
        )
        rate = layout.workers * seqs / itl
        return Estimate(
            layout,
            seqs,
            itl,
            rate,
            bool(in_time),
            self._choose_batched_tokens(layout, devices, seqs),
            kv_tokens,
        )

    def seconds(self, layout: Layout, devices: PacedDevices, seqs: float) -> float:
        """Seconds between two tokens of a request if each worker has `seqs` of them."""
        return self._step(layout, devices, seqs * self._demand.rows_per_token, layout.workers)

    def _step(self, layout: Layout, devices: PacedDevices, rows: float, workers: int) -> float:
        """Seconds of a step of all layers. workers: number of those that compute as many rows."""
        if layout.is_replicated:
            return self._step(layout.host_layout, devices, rows, -(-workers // layout.attention_hosts))
        fullest = self.fullest_share(layout.servers)
        worker = devices.attention.seconds(rows)
        servers = self._run(layout, devices, workers * rows * fullest)
        if layout.is_colocated:
            return self._model.moe_layers * (worker + servers)
        sent_copies, answer_copies = min(self._top_k, layout.servers), self._top_k * fullest
        size = rows * self._model.hidden * NUMBER_BYTES
        way = 2 * devices.link.latency + size * (sent_copies + answer_copies) / devices.link.bandwidth
        single_step = worker + way + self._run(layout, devices, rows * fullest)
        return self._model.moe_layers * max(worker, servers, single_step)

    def _run(self, layout: Layout, devices: PacedDevices, rows: float) -> float:
        """Seconds of a run of a server that gets as many pairs as `rows` rows have."""
        num_experts = touched(self._model.experts, self._top_k, rows * layout.servers) / layout.servers
        return devices.experts.seconds(rows * self._top_k, num_experts)

    def fullest_share(self, servers: int) -> float:
        """Mean over layers of the fullest server's share of the pairs, where servers hold even ranges."""
        parts = np.array_split(self._shares, servers, axis=1)
        return float(np.max([part.sum(axis=1) for part in parts], axis=0).mean())

    def _choose_batched_tokens(self, layout: Layout, devices: PacedDevices, seqs: int) -> int:
        sizes = [rows for rows in BATCHED_TOKENS if rows >= seqs] or [seqs]
        if self._itl is None:
            return max(seqs, 2048)
        fast_sizes = [rows for rows in sizes if self._step(layout, devices, rows, 1) <= self._itl]
        return fast_sizes[-1] if fast_sizes else sizes[0]


def _powers_of_two(limit: int) -> Iterator[int]:
    power = 1
    while power <= limit:
        yield power
        power *= 2
