"""A real worker and real expert servers in threads of this process, and a record of all decisions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import moesaic
from moesaic.config import ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.request import Request, SamplingParams
from moesaic.experts.server import ExpertServer
from moesaic.experts.torch_backend import TorchBackend
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.policy.fleet.replicas import ReplicaTimeout
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.microqueue import make_policy
from moesaic.policy.scheduling.schedulers.actions import Action, Event
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, Run, StartRule
from moesaic.policy.scheduling.schedulers.ready_queues import GatherRule
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.transport.listening import Listener
from moesaic.transport.local import local_pair
from moesaic.transport.wakeup import Wakeup

SECRET = b"a secret of the tests"
DEMO = Path(moesaic.__file__).parent / "demo"
Journal = list[tuple[Event, float, list[Action]]]


class RecordedService(ExpertServerScheduler):
    """The scheduler of a server that notes what it is told, and what it decides."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: list[tuple[Any, ...]] = []
        """("arrived", now, call, client, layer, experts), ("barrier", now), ("opened",), ("run", now, run).

        A client that arrives at the barrier pauses. When it joins again at once, the barrier has opened.
        """

    def client_joined(self, client: int) -> None:
        if self.log and self.log[-1][0] == "barrier":
            self.log.append(("opened",))
        super().client_joined(client)

    def client_paused(self, client: int) -> None:
        self.log.append(("barrier", time.monotonic()))
        super().client_paused(client)

    def add_call(self, call: int, client: int, layer: int, experts: Any, now: float) -> None:
        self.log.append(("arrived", now, call, client, layer, np.array(experts)))
        super().add_call(call, client, layer, experts, now)

    def next_run(self, now: float) -> Run | None:
        run = super().next_run(now)
        self.log.append(("run", now, run))
        return run


@dataclass
class Recorded:
    """What happened."""

    layout: ExpertLayout
    limits: BatchLimits
    num_blocks: int
    gather: GatherRule | None
    """Of the asynchronous schedule: when a run may begin."""
    journal: Journal = field(default_factory=list)
    services: list[RecordedService] = field(default_factory=list)


@contextmanager
def _serving(
    layout: ExpertLayout, servers: int, rule: StartRule
) -> Iterator[tuple[list[RecordedService], Directory]]:
    """Servers in threads. Server i holds the experts whose number modulo `servers` is i."""
    stopped = threading.Event()
    services, entries, threads, held = [], [], [], {}
    for number in range(servers):
        held[number] = {layer: list(range(number, layout.num_experts, servers)) for layer in layout.layers}
        backend = TorchBackend(DEMO, layout, "cpu", "reference", 1, True)
        backend.load(held[number])
        listener = Listener("unix:@", SECRET)
        service = RecordedService(layout.layers, make_policy("defrag"), rule)
        server = ExpertServer(layout, backend, listener, service, time.monotonic)
        services.append(service)
        entries.append(ServerEntry(number, 1, listener.endpoint))

        def turn(server: ExpertServer = server) -> None:
            while not stopped.is_set():
                server.turn(0.01)
            server.close()

        threads.append(threading.Thread(target=turn))
    for thread in threads:
        thread.start()
    try:
        yield services, Directory(1, entries, held)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def record(schedule: str, rule: StartRule, servers: int = 2, requests: int = 12, **settings: Any) -> Recorded:
    """Serve requests of the demo checkpoint, some of which come while others run."""
    layout = registry.expert_layout(DEMO, table.pick("cpu", "auto"))
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, schedule=schedule, **settings)  # type: ignore[arg-type]
    config = WorkerConfig(
        ModelConfig(str(DEMO), threads=1, max_model_len=96, kernels="reference", enforce_eager=True),
        scheduler=scheduler,
        remote_experts=True,
    )
    ours, theirs = local_pair()
    wakeup, journal = Wakeup(), Journal()
    context = WorkerContext(
        config, theirs, time.monotonic, journal=lambda *entry: journal.append(entry), wakeup=wakeup
    )
    worker, info = build_worker(context)
    replicas = worker._servers._replicas  # type: ignore[attr-defined]
    replicas._patience = ReplicaTimeout(floor=1e9, unknown=1e9)  # a machine that is busy loses no server
    gather = getattr(worker._scheduler, "_gather", None)
    found = Recorded(layout, context.limits, info.num_blocks, gather, journal)

    def send(message: messages.Message) -> None:
        ours.send(message)
        wakeup.ring()

    thread = threading.Thread(target=worker.run)
    with _serving(layout, servers, rule) as (found.services, directory):
        thread.start()
        send(messages.Serving(directory, SECRET))
        rng, left = np.random.default_rng(5), requests
        for number in range(requests):
            prompt = rng.integers(1, 100, int(rng.integers(3, 40))).tolist()
            params = SamplingParams(
                temperature=0.0, max_tokens=int(rng.integers(4, 12)), ignore_eos=True, seed=1
            )
            send(messages.Submit([Request(number, prompt, params, arrival=time.monotonic())]))
            time.sleep(float(rng.exponential(0.01)))
        while left:
            message = ours.receive(60.0)
            assert message is not None, "the worker hangs"
            if isinstance(message, messages.Tokens):
                left -= sum(finish is not None for finish in message.finish)
        send(messages.Shutdown())
        thread.join(60.0)
        worker._servers.close()  # type: ignore[attr-defined]
    return found
