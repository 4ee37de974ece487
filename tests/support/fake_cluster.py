"""A cluster without processes, with the interface that the server uses."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from moesaic.core.cluster_status import (
    ClusterCounters,
    ClusterLoad,
    ClusterStatus,
    Failure,
    HostStatus,
    LayerLocality,
    LayerReplicas,
    LinkStatus,
    PlacementSolve,
    ProcessStatus,
)
from moesaic.core.errors import ConfigError, ScalingError
from moesaic.core.metrics import ExpertServerStats, WorkerStats
from moesaic.core.tokens import IntArray

SERVER, WORKER = "expert server", "attention worker"


class FakeCluster:
    """Scales at once, or raises `failure`."""

    def __init__(self, pairs: IntArray | None = None, failure: Exception | None = None) -> None:
        self.servers, self.workers = 2, 1
        self.failure = failure
        self.asked: list[tuple[int | None, ...]] = []
        self.killed: list[str] = []
        self._pairs = pairs

    def report(self) -> ClusterStatus:
        roles = [WORKER] * self.workers + [SERVER] * self.servers
        return ClusterStatus(
            directory_version=7,
            placement_version=3,
            change=None,
            processes=[self._process(role, number) for number, role in enumerate(roles)],
            replicas=[LayerReplicas(1, 1, 2, [1], [], {1: "1", 2: "0, 2-3"})],
            failures=[Failure(1.5, "expert server 0: killed by signal 9")],
            counters=ClusterCounters(
                process_deaths=4,
                failovers=3,
                silent_failovers=2,
                false_failovers=1,
                resent_pairs=99,
                missed_ttft=5,
                missed_itl=6,
                refused_connections=7,
                far_bytes=8,
            ),
            hosts=[
                HostStatus("", ["attention worker 0", "expert server 1"]),
                HostStatus("b", ["expert server 2"]),
            ],
            links=[LinkStatus("", "b", 1e-4, 1e9, "measured")],
            dispatch="affinity",
            locality=[LayerLocality(1, 40, 30, 0.75), LayerLocality(2, 40, 10, 0.25)],
            placement_solve=PlacementSolve(
                "swapped", 3, 2, gain_seconds=4.5, cost_seconds=0.5, local_after=0.6
            ),
        )

    def _process(self, role: str, number: int) -> ProcessStatus:
        stats = ExpertServerStats(waiting_pairs=10 * number)
        stage = "starting" if number == 2 else "serving"
        held = {1: "0, 2-3"} if role == SERVER else {}
        return ProcessStatus(
            f"{role} {number}", role, number, stage, 1, 1, 0, None, 0.0, held=held, stats=stats
        )

    def load(self) -> ClusterLoad | None:
        if self._pairs is None:
            return None
        layers = tuple(range(1, len(self._pairs) + 1))
        return ClusterLoad(layers, self._pairs, np.full(len(layers), 0.5))

    def worker_stats(self) -> dict[str, WorkerStats]:
        return {f"{WORKER} 0": WorkerStats(running=2)}

    def kill(self, name: str) -> str:
        if self.failure is not None:
            raise self.failure
        self.killed.append(name)
        return f"{name} was killed; it is started again"

    def scale(
        self,
        expert_servers: int | None = None,
        attention_workers: int | None = None,
        prefill_workers: int | None = None,
    ) -> Future[None]:
        self.asked.append((expert_servers, attention_workers, prefill_workers))
        future: Future[None] = Future()
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            self.servers, self.workers = expert_servers or self.servers, attention_workers or self.workers
            future.set_result(None)
        return future

    def cancel_scaling(self) -> Future[None]:
        """There is never anything to cancel."""
        future: Future[None] = Future()
        future.set_exception(ScalingError("no scaling call is under way", conflict=True))
        return future


BUSY = ScalingError("a newer scaling call replaced this one", conflict=True)
BROKEN = ScalingError("expert server 3 did not come up; the cluster is as it was")
WRONG = ConfigError.field("expert_servers", 0, "at least 1")
