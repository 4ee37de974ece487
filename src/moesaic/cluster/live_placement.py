"""Solves the placement and the dispatch tables anew from live routing (`--rebalance routing`).

A thread writes down what was recorded and waits for a process that solves it (`moesaic.cluster.solving`). The
supervisor's thread asks `take` for the result, lets the policy judge it, and makes the change. So no request
and no restart ever waits for a solver.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from moesaic.cluster.dispatching import read_tables
from moesaic.cluster.solving.job import Job, read
from moesaic.config import ClusterConfig, worker_environment
from moesaic.core.cluster_status import PlacementSolve
from moesaic.core.errors import MoesaicError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tables import Tables
from moesaic.policy.placement.online import SolveRule, Traffic, Verdict
from moesaic.policy.placement.online_solution import Solution
from moesaic.trace.live_routing import LiveRouting

LOG = logging.getLogger(__name__)
SECONDS = 600
"""Maximum seconds of a solve."""
SOLVER = "ours"
"""Name of the solver, as of `moesaic place`."""


class LivePlacement:
    """The solves of one cluster. Only the supervisor's thread uses it."""

    def __init__(
        self,
        routing: LiveRouting,
        interval: float,
        now: float,
        tables: Tables | None,
        workers: Sequence[int] = (),
    ) -> None:
        """interval: seconds between two solves. tables: those by which requests are dispatched now. workers:
        the worker of each of their ranks."""
        self.tables = tables
        self._workers = tuple(workers)
        self.status = PlacementSolve("no solve yet")
        self._routing = routing
        self._rule = SolveRule(interval, now)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._result: Solution | str | None = None
        """What the thread found, or why it found nothing."""
        self._traffic: Traffic | None = None
        self._is_stopped = False

    @classmethod
    def from_cluster(
        cls, routing: LiveRouting, cluster: ClusterConfig, placement: Placement | None, now: float
    ) -> LivePlacement:
        """The solves of a cluster that begins with `placement`. routing: what its workers record."""
        tables, workers = read_tables(cluster, placement), range(cluster.attention_workers)
        return cls(routing, cluster.rebalance_interval, now, tables, workers)

    def take(
        self, now: float, job: Callable[[Profile], Job], traffic: Callable[[], Traffic]
    ) -> tuple[Solution, Traffic] | None:
        """The result of a solve that has ended, once. Otherwise starts one when it is time.

        job: makes a job of what was recorded. traffic: that of the last interval, from which the routing is;
        while it is solved, requests may have ended.
        """
        if self._thread is not None:
            return None if self._thread.is_alive() else self._take_result()
        requests, tokens = self._routing.size
        self.status = replace(self.status, recorded_requests=requests, recorded_tokens=tokens)
        if self._rule.due(now, requests, tokens):
            profile = self._routing.take()
            if profile is not None and profile.routes.requests > 1:  # fewer say nothing about a placement
                self._set_state("solving")
                self._traffic = traffic()
                self._thread = threading.Thread(target=self._run, args=(job(profile),), daemon=True)
                self._thread.start()
        return None

    def record_verdict(self, solution: Solution, verdict: Verdict) -> None:
        """Remember a verdict for the status."""
        state = f"not swapped: {verdict.reason}" if verdict.reason else "swapping"
        self.status = replace(
            self.status,
            gain_seconds=verdict.gain,
            cost_seconds=verdict.cost,
            local_before=solution.old_forecast.local,
            local_after=solution.new_forecast.local,
            balancedness_before=solution.old_forecast.balancedness,
            balancedness_after=solution.new_forecast.balancedness,
        )
        self._set_state(state)

    def tables_for(self, workers: Sequence[int]) -> Tables | None:
        """The tables by which requests are dispatched now; None if these workers are not their ranks."""
        return self.tables if self._workers == tuple(workers) else None

    def record_swap(self, solution: Solution, workers: Sequence[int]) -> None:
        """Clients route by this placement now. workers: the worker of each rank."""
        self.tables, self._workers = solution.tables, tuple(workers)
        self.status = replace(self.status, swaps=self.status.swaps + 1)
        self._set_state("swapped")

    def record_failure(self, reason: str) -> None:
        """The swap was undone."""
        self._set_state(f"not swapped: {reason}")

    def stop(self) -> None:
        """Ends the process that solves."""
        self._is_stopped = True
        process = self._process  # the thread sets it to None
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()

    # ---- internal

    def _set_state(self, state: str) -> None:
        self.status = replace(self.status, state=state)
        now = self.status
        figures = ""
        if state != "solving" and now.solves:
            figures = (
                f" (predicted gain {now.gain_seconds:.3g} s, cost {now.cost_seconds:.3g} s, "
                f"local {now.local_before:.1%} -> {now.local_after:.1%})"
            )
        LOG.info("placement from live routing: %s%s", state, figures)

    def _take_result(self) -> tuple[Solution, Traffic] | None:
        self._thread, result, self._result = None, self._result, None
        if isinstance(result, Solution) and self._traffic is not None:
            return result, self._traffic
        self._set_state(f"not solved: {result}")
        return None

    def _run(self, job: Job) -> None:
        start_time = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="moesaic-solving-") as name:
                self._result = self._solve(job, Path(name))
        except (OSError, MoesaicError, ValueError) as error:
            self._result = str(error)
        self.status = replace(
            self.status,
            solves=self.status.solves + isinstance(self._result, Solution),
            last=time.time(),
            seconds=time.monotonic() - start_time,
        )

    def _solve(self, job: Job, folder: Path) -> Solution | str:
        """The answer of a process, or why there is none."""
        job.save(folder)
        command = [sys.executable, "-m", "moesaic.cluster.solving", str(folder), str(SECONDS)]
        process = self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end ends the process, too
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=worker_environment(),
            process_group=0,  # Ctrl-C only reaches the engine
        )
        if self._is_stopped:
            process.kill()
        assert process.stdin is not None and process.stderr is not None
        error_lines = process.stderr.read().decode(errors="replace").strip().splitlines()
        code = process.wait()
        process.stdin.close()
        process.stderr.close()
        self._process = None
        if code:
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            return f"the solver ended by {ending} after at most {SECONDS} s" + "".join(
                f": {line}" for line in error_lines[-1:]
            )
        return read(folder)
