"""Where the time of an execution step goes, by the stages of Asynchronous Expert Parallelism, section 5.4.

    schedule         the scheduler: what runs next, with which rows
    page table       KV blocks are allocated, block tables and slots are built (attention workers only)
    pre-processing   what came in is gathered into one batch
    execution        kernels
    post-processing  rows are split by server and copied out, or answers are published

and beside them sampling, messages (engine, supervisor, statistics) and waiting. Counted is CPU time of the
loop's thread, each moment in the innermost stage, so that processes that share a core do not count each
other's time. `timed_worker` and `timed_server` are the programs of both processes with these stopwatches in.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moesaic.experts import native_backend, remote, server
from moesaic.policy.scheduling.schedulers import expert_server
from moesaic.transport.stream import StreamConnection

FOLDER = "MOESAIC_BREAKDOWN"
"""Environment variable with the folder in which each process writes its times."""
WRITE_SECONDS = 0.2
STAGES = ("schedule", "page table", "pre-processing", "execution", "post-processing", "sampling", "messages")


class Stopwatch:
    """CPU seconds by stage, without nested stages, of the thread that starts it first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.layers: dict[int, float] = defaultdict(float)
        """CPU seconds of execution by layer."""
        self.runs = 0
        """Number of batches that were executed. Each is at one layer."""
        self._open: list[str] = []
        self._since = 0.0
        self._thread: int | None = None

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Time calls of `owner.name` as `stage`. Other threads' calls are left alone."""
        function = getattr(owner, name)
        static = isinstance(vars(owner).get(name), classmethod | staticmethod)

        @functools.wraps(function)
        def timed(*arguments: Any, **more: Any) -> Any:
            if self._thread is None:
                self._thread = threading.get_ident()
            if self._thread != threading.get_ident():
                return function(*arguments, **more)
            self._switch()
            self._open.append(stage)
            try:
                return function(*arguments, **more)
            finally:
                self._switch()
                self._open.pop()

        setattr(owner, name, staticmethod(timed) if static else timed)

    def by_layer(self, owner: Any, name: str, layer_of: Callable[..., int]) -> None:
        """Count calls of `owner.name` as runs, and their CPU time for the layer that `layer_of` finds."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*arguments: Any, **more: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*arguments, **more)
            finally:
                self.runs += 1
                self.layers[layer_of(*arguments, **more)] += time.thread_time() - started

        setattr(owner, name, counted)

    def write(self, file: Path) -> None:
        """Write a file in one rename, so that a reader sees all of it or nothing."""
        part = file.with_suffix(".part")
        found = {"seconds": dict(self.seconds), "layers": dict(self.layers), "runs": self.runs}
        part.write_text(json.dumps(found))
        part.replace(file)

    def _switch(self) -> None:
        now = time.thread_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def start(watch: Stopwatch, kind: str) -> None:
    """Write what `watch` has at regular intervals, from a thread of its own."""
    file = Path(os.environ[FOLDER]) / f"{kind}-{os.getpid()}.json"

    def write() -> None:
        while True:
            watch.write(file)
            time.sleep(WRITE_SECONDS)

    threading.Thread(target=write, name="breakdown", daemon=True).start()


def watch_server() -> None:
    """Put stopwatches into the expert server of this process."""
    watch = Stopwatch()
    watch.wrap(server.ExpertServer, "turn", "messages")
    watch.wrap(server.ExpertServer, "_collect", "pre-processing")
    watch.wrap(server.ExpertServer, "_run", "pre-processing")
    watch.wrap(server.ExpertServer, "_answer", "post-processing")
    watch.wrap(expert_server.ExpertServerScheduler, "next_run", "schedule")
    watch.wrap(expert_server.ExpertServerScheduler, "add_call", "schedule")
    watch.wrap(native_backend.NativeBackend, "run", "execution")
    watch.wrap(server, "wait", "waiting")
    watch.by_layer(server.ExpertServer, "_run", lambda _, run, started: int(run.layer))
    start(watch, "server")


def watch_worker() -> None:
    """Put stopwatches into the attention worker of this process. Only that imports torch."""
    from moesaic.kernels import batch
    from moesaic.kernels.native import recording
    from moesaic.models import block
    from moesaic.policy.scheduling import kvblocks
    from moesaic.policy.scheduling.schedulers import asynchronous, barrier, lockstep, unit
    from moesaic.runtime import executor, worker
    from moesaic.runtime.step import layerwise, running_step, stages

    watch = Stopwatch()
    watch.wrap(worker.Worker, "turn", "messages")
    watch.wrap(StreamConnection, "receive", "waiting")
    for scheduler in (lockstep.LockstepScheduler, barrier.BarrierScheduler, asynchronous.AsyncScheduler):
        watch.wrap(scheduler, "handle", "schedule")
    for module in (lockstep, unit):
        watch.wrap(module, "plan_step", "page table")
    watch.wrap(unit.UnitTable, "plan", "page table")
    for name in ("allocate", "commit", "free"):
        watch.wrap(kvblocks.KVBlocks, name, "page table")
    watch.wrap(batch.AttentionBatch, "build", "page table")
    watch.wrap(running_step.RunningStep, "advance", "pre-processing")
    watch.wrap(layerwise.LayerwiseRunner, "run", "pre-processing")
    watch.wrap(remote.RemoteExperts, "_progress", "pre-processing")
    watch.wrap(stages, "until_gate", "execution")
    for name in ("dense", "merge"):
        watch.wrap(block.Block, name, "execution")
    watch.wrap(recording.Recording, "run", "execution")
    watch.wrap(remote.RemoteExperts, "submit", "post-processing")
    watch.by_layer(remote.RemoteExperts, "submit", lambda client, request: int(request.layer))
    watch.wrap(remote.RemoteExperts, "wait", "waiting")
    watch.wrap(executor.Executor, "_finish", "sampling")
    start(watch, "worker")


def read(folder: Path, kind: str, pids: list[int]) -> list[dict[str, Any]]:
    """The last values that these processes wrote."""
    return [json.loads((folder / f"{kind}-{pid}.json").read_text()) for pid in pids]


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a process spent between two readings, by stage."""
    found: dict[str, Any] = {"runs": after["runs"] - before["runs"]}
    for name in ("seconds", "layers"):
        old = before[name]
        found[name] = {key: value - old.get(key, 0.0) for key, value in after[name].items()}
    return found


def bound(workers: list[dict[str, Any]], servers: list[dict[str, Any]]) -> tuple[float, float]:
    """CPU seconds that ranks need at least: with a barrier at each layer's experts, and if all may overlap.

    Rank i is worker i and server i. With barriers every rank waits at each layer for the one with most to do;
    without, the rank with the most work in all is the limit.
    Example: workers without work, servers with layers {0: 3, 1: 1} and {0: 1, 1: 3}: 6 and 4.
    """

    def busy(one: dict[str, Any]) -> float:
        return float(sum(one["seconds"].get(stage, 0.0) for stage in STAGES))

    attention = [busy(one) for one in workers]
    names = {layer for one in servers for layer in one["layers"]}
    barrier = max(attention) + sum(max(one["layers"].get(name, 0.0) for one in servers) for name in names)
    experts = [sum(one["layers"].values()) for one in servers]
    return barrier, max(a + b for a, b in zip(attention, experts, strict=True))
