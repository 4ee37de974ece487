"""Processes of other hosts, for a cluster that a command starts in this process; here they reach it over TCP.

On one machine such a process differs from a child of the command: it calls `--cluster-address` itself, gets
its settings there, and is reached by encrypted TCP.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moesaic.cluster.launch import LaunchedEngine, launch
from moesaic.cluster.supervisor import Supervisor
from moesaic.config import ClusterConfig, WorkerConfig

PATIENCE = 240.0
"""Seconds after which a test counts as hanging, also on a busy machine."""


class OtherHosts:
    """What joins the cluster of one command."""

    def __init__(self, folder: Path, joins: Sequence[str], standby_for: str | None) -> None:
        """folder: with the file `secret`; it gets the logs. joins: roles of processes that join. standby_for:
        of the settings of the cluster, which starts as if that host was gone."""
        self._folder, self._joins, self._standby_for = folder, joins, standby_for
        self.ended: list[tuple[int, str]] = []
        """The exit code of each process that joined, and what it wrote."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside, clusters of `run-batch` have these hosts."""
        with patch("moesaic.jobs.batch.local.launch", self._launch):
            yield

    @contextmanager
    def _launch(self, config: WorkerConfig, cluster: ClusterConfig, **more: Any) -> Iterator[LaunchedEngine]:
        cluster = replace(cluster, standby_for=self._standby_for)
        here = cluster.resolve()
        workers, prefill = here.attention_workers, here.prefill_workers
        needed = ["ranks"] * (workers + prefill) * (here.nnodes - 1)
        if self._standby_for is not None:
            needed += ["attention-worker"] * workers + ["prefill-worker"] * prefill
            needed += ["expert-server"] * here.expert_servers
        with ExitStack() as stack, launch(config, cluster, **more) as launched:
            assert launched.supervisor is not None
            address = (launched.supervisor.report().join_address or "").removeprefix("tcp:")
            started = [stack.enter_context(self._joined(address, role)) for role in [*needed, *self._joins]]
            counts = {"attention worker": workers, "prefill worker": prefill}
            counts |= {"expert server": here.expert_servers, "ranks": needed.count("ranks")}
            self._until(launched.supervisor, Counter(counts) + Counter(map(_spoken, self._joins)), started)
            yield launched

    @contextmanager
    def _joined(self, address: str, role: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "moesaic", "join", address, "--role", role, "--threads", "1"]
        command += ["--secret-file", str(self._folder / "secret")]
        log = self._folder / f"{role}-{len(self.ended)}-{time.monotonic_ns()}.log"
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, text=True)
        try:
            yield process
        finally:
            try:
                code = process.wait(PATIENCE)
            finally:
                process.kill()
            self.ended.append((code, log.read_text()))

    def _until(
        self, supervisor: Supervisor, counts: Counter[str], started: list[subprocess.Popen[str]]
    ) -> None:
        """Waits until so many processes of each role serve, or one that joins has ended."""
        deadline = time.monotonic() + PATIENCE
        while all(one.poll() is None for one in started):
            report = supervisor.report()
            serving = Counter(one.role for one in report.processes if one.stage == "serving")
            if report.change is None and serving == counts:
                return
            assert time.monotonic() < deadline, (dict(counts), report, self._logs())
            time.sleep(0.05)

    def _logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self._folder.glob("*.log")))


def _spoken(role: str) -> str:
    """A role as the status names it."""
    return role.replace("-", " ")
