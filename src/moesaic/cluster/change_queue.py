"""The changes that a cluster has still to make: requested by users, by joining servers, or by its own load.

Changes happen one at a time, in the order of the requests. Changes due to load come last.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from moesaic.cluster.balancing import Balancing, autoscaler
from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.member import Member, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.objectives import Objectives
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.router import Router
from moesaic.cluster.scaling import Change, Changes
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError, ScalingError
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.core.tokens import IntArray

LOG = logging.getLogger(__name__)
RETRY_SECONDS = 5.0
"""Seconds to wait after a failed change that was due to load or to a lost server."""


@dataclass(frozen=True)
class _QueuedChange:
    what: str
    """Description for people."""
    change: Change
    future: Future[None] | None = None
    """Future of the user who requested the change; None if nobody waits for it."""


class ChangeQueue:
    """The queue of changes. Only the supervisor's thread uses it."""

    def __init__(
        self,
        members: Members,
        publisher: Publisher,
        router: Router,
        cluster: ClusterConfig,
        clock: Callable[[], float],
        note: Callable[[str], None],
    ) -> None:
        """note: records a failure. Raises ConfigError for an --autoscale that is not possible."""
        autoscaler(cluster)
        router.objectives = Objectives.of(cluster, clock)
        self.balancing: Balancing | None = None
        """Created when the layout is known."""
        self.changes = Changes(members, publisher, router, cluster, self._load, clock)
        self.rebalances = 0
        self._members = members
        self._publisher = publisher
        self._router = router
        self._cluster = cluster
        self._clock = clock
        self._note = note
        self._queue: deque[_QueuedChange] = deque()
        self._current: _QueuedChange | None = None
        self._quiet_until = -math.inf

    @property
    def layout(self) -> ExpertLayout | None:
        return self.changes.layout

    @property
    def under_way(self) -> str | None:
        """Description of the change under way; None if there is none."""
        wanted = self._current
        return None if wanted is None else wanted.what

    def lay_out(self, layout: ExpertLayout, homes: Placement | None = None) -> None:
        """Set the layout of the experts. homes: see `Balancing`."""
        self.changes.layout = layout
        copies, servers = self._cluster.redundant_experts, len(self._members.servers)
        most = layout.num_experts * (servers - 1)  # a server holds at most one copy of an expert
        what = "--redundant-experts: got %d; with --expert-servers %d at most %d have a place"
        if copies > most:
            LOG.warning(what, copies, servers, most)
        self.balancing = Balancing(layout, self._cluster, self._clock(), homes)

    # ---- requests

    def scale(self, servers: int | None, workers: int | None, future: Future[None]) -> None:
        """Requests these numbers. It is refused while another requested change is under way."""
        pending = [self._current, *self._queue]
        try:
            if any(wanted is not None and wanted.future is not None for wanted in pending):
                raise ScalingError("the cluster is being scaled already; wait for its end", conflict=True)
            now = len(self._members.servers), len(self._members.workers)
            self.changes.check(now[0] if servers is None else servers, now[1] if workers is None else workers)
        except (ScalingError, ConfigError) as error:
            future.set_exception(error)
            return
        self._queue.append(_QueuedChange("scaling", self.changes.scale(servers, workers), future))

    def join(self, process: RemoteProcess) -> None:
        """Adds a change for a server that joins from another machine."""
        if self.layout is None or self._cluster.expert_servers == 0:
            process.kill()  # it will try again
            return
        what = f"an expert server joins from {process.peer}"
        self._queue.append(_QueuedChange(what, self.changes.add_server(process, process.capacity)))

    def add_report(self, member: Member, load: list[list[int]]) -> None:
        """Adds a server's report. load: [L][E] pairs, see `Loads.add_report`."""
        if self.balancing is not None:
            self.balancing.loads.add_report(member.number, member.incarnation, member.stats, load)

    def advance(self, now: float) -> None:
        """Continues the change under way, or begins the next one."""
        if self.balancing is not None:
            self.balancing.loads.tick(now, [member.number for member in self._members.servers])
        if self._current is None:
            self._current = self._next(now)
        if self._current is None:
            return
        try:
            next(self._current.change)
        except StopIteration:
            self._end(self._current, None)
        except (ScalingError, ConfigError) as error:
            self._note(f"{self._current.what}: {error}")
            self._quiet_until = now + RETRY_SECONDS
            self._end(self._current, error)
        except Exception as error:
            self._quiet_until = now + RETRY_SECONDS
            self._end(
                self._current, ScalingError(f"{self._current.what} failed: {type(error).__name__}: {error}")
            )
            raise

    def stop(self, why: str) -> None:
        """Refuses all waiting changes. why: the reason for their users."""
        open_changes, self._current = [self._current, *self._queue], None
        self._queue.clear()
        for wanted in open_changes:
            if wanted is not None and wanted.future is not None:
                wanted.future.set_exception(ScalingError(why))

    # ---- internal

    def _end(self, wanted: _QueuedChange, error: Exception | None) -> None:
        self._current = None
        LOG.info("%s: %s", wanted.what, error or "done")
        if wanted.future is not None and error is None:
            wanted.future.set_result(None)
        elif wanted.future is not None:
            wanted.future.set_exception(error)

    def _next(self, now: float) -> _QueuedChange | None:
        gone = [member for member in self._members.servers if member.stage is Stage.STOPPED]
        if gone and now >= self._quiet_until:
            left = len(self._members.servers) - 1
            change = self.changes.remove_server(gone[0], max(1, min(self._cluster.min_replicas, left)))
            return _QueuedChange(f"{gone[0].name} is gone", change)
        if self._queue:
            return self._queue.popleft()
        return self._by_load(now) if now >= self._quiet_until else None

    def _by_load(self, now: float) -> _QueuedChange | None:
        """Returns the change that the load requires; usually None."""
        balancing, placement = self.balancing, self._publisher.placement
        if balancing is None or placement is None:
            return None
        servers = self._members.servers
        busy = {(member.number, member.incarnation): member.stats.busy_seconds for member in servers}
        waiting = self._router.stats().waiting
        missed = self._router.objectives.missed
        wanted = balancing.wanted_servers(now, waiting, busy, len(servers), missed)
        if wanted != len(servers):
            what = f"autoscaling from {len(servers)} to {wanted} expert servers"
            return _QueuedChange(what, self.changes.scale(wanted, None))
        new = balancing.rebalanced(now, placement, self._members.capacities)
        if new is None:
            return None
        self.rebalances += 1
        return _QueuedChange("rebalancing", self.changes.rebalance(new))

    def _load(self) -> IntArray:
        assert self.layout is not None
        if self.balancing is not None:
            return self.balancing.loads.window()
        return np.zeros((len(self.layout.layers), self.layout.num_experts), dtype=np.int64)
