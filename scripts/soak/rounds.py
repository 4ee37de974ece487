"""Runs one round: a cluster, traffic and faults. Then looks for what they left behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from unittest.mock import patch

from scripts.soak.answers import difference, spanning_gap
from scripts.soak.faults import Saboteur, Strike
from scripts.soak.leaks import Leaks, growth, held_by, holdings, left_over
from scripts.soak.models import Models
from scripts.soak.plan import PREFILL, SERVER, SEVERAL, WORKER, Order, Plan, Shape, orders, pool
from tests.support.cluster_driver import Cluster, cluster
from tests.support.faulty_transport import Faults
from tests.support.faulty_worker import faulty

from moesaic.cluster import local
from moesaic.cluster.local import ChildProcess
from moesaic.cluster.router import Router
from moesaic.config import ExpertServerConfig
from moesaic.core.cluster_status import ClusterCounters
from moesaic.core.errors import MoesaicError

FROZEN_SECONDS = 2.0
"""Seconds after which the supervisor restarts a frozen process. Shorter than its default, so that a freeze of
3 s triggers it.
"""
SILENCE = 40.0
"""Seconds without a token after which a round is given up."""
BAD = Faults(delay=0.3, duplicate=0.2, reorder=True, cut_after=150)
"""Faults of connections that need no replica."""
WORSE = replace(BAD, drop_request=0.005, drop=0.0005)
"""Faults that also lose messages. Lost pairs are asked of another server. At a barrier nobody can know that
one was lost.
"""


@dataclass(frozen=True)
class Pause:
    """A fault, and the longest pause of a stream during which it happened."""

    kind: str
    role: str
    victim: str
    min_replicas: int
    seconds: float
    alone: bool
    """No other process was dead or frozen when it happened, nor before the pause ended, and connections were
    good."""


@dataclass
class Outcome:
    """The result of a round."""

    seed: str
    shape: str
    kind: str = SEVERAL
    """The kind of its faults."""
    bad_connections: bool = False
    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    tokens: int = 0
    """Number of tokens that were compared."""
    different: list[str] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    longest_gap: float = 0.0
    """The longest time between two tokens of one stream, in seconds."""
    counters: ClusterCounters = field(default_factory=ClusterCounters)
    leaks: Leaks = field(default_factory=lambda: Leaks({}))
    error: str | None = None
    """Why the round broke off. None if it did not."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.different or self.leaks or self.error)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class Traffic:
    """Keeps requests in flight until all faults have happened, and compares every answer."""

    def __init__(self, served: Cluster, plan: Plan, models: Models, outcome: Outcome) -> None:
        self._served, self._plan, self._outcome = served, plan, outcome
        self._expected = models.alone(plan.shape)
        self._exact = plan.shape.exact
        self._pool = pool(greedy=not self._exact, vocabulary=models.vocabulary(plan.shape.model))
        self._orders = orders(plan.seed, len(self._expected))
        self._open: dict[int, Order] = {}

    def run(self, saboteur: Saboteur) -> None:
        """Run until every fault has happened and every request has ended. Raises AssertionError when nothing
        progresses any more."""
        tokens, moved = -1, time.monotonic()
        while self._more(saboteur) or self._open:
            while self._more(saboteur) and len(self._open) < self._plan.together:
                self._submit()
            self._served.take(0.02)
            now = time.monotonic()
            saboteur.look(self._served.running.tokens, now)
            self._collect()
            if self._served.running.tokens > tokens:
                tokens, moved = self._served.running.tokens, now
            assert now - moved < SILENCE, f"no token for {SILENCE:.0f} s: {self._served.supervisor.report()}"

    def _more(self, saboteur: Saboteur) -> bool:
        """Whether more requests are sent."""
        return not saboteur.done or self._outcome.requests < self._plan.requests

    def _submit(self) -> None:
        order = next(self._orders)
        prompt, params = self._pool[order.number]
        number = len(self._served.running.answers)
        self._served.submit([prompt], [replace(params, max_tokens=order.max_tokens)])
        self._open[number] = order
        self._outcome.requests += 1

    def _collect(self) -> None:
        """Cancel what is due, and compare what has ended."""
        running = self._served.running
        for number, order in list(self._open.items()):
            cut = order.cancel_after is not None and len(running.answers[number][0]) >= order.cancel_after
            if number in running.unfinished and not cut:
                continue
            finished = number not in running.unfinished
            if not finished:
                self._served.cancel(number)
            del self._open[number]
            self._compare(number, order, finished)

    def _compare(self, number: int, order: Order, finished: bool) -> None:
        got, outcome = self._served.running.answers[number], self._outcome
        outcome.completed += finished
        outcome.cancelled += not finished
        outcome.tokens += len(got[0])
        length = order.max_tokens if finished else None
        wrong = difference(self._expected[order.number], got, length, self._exact)
        if wrong is not None:
            outcome.different.append(f"request {number} (number {order.number} of the pool): {wrong}")


def run_round(plan: Plan, models: Models, folder: Path) -> Outcome:
    """Run one round. folder: an empty folder for temporary files."""
    models.alone(plan.shape)
    outcome = Outcome(plan.seed, plan.shape.name, plan.kind, plan.shape.bad_connections)
    before, started = holdings(folder), time.monotonic()
    try:
        with _cluster(plan.shape, models.path(plan.shape.model)) as served:
            _drive(served, plan, models, outcome)
    except (AssertionError, MoesaicError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.leaks = Leaks(outcome.leaks.found | left_over(before, folder).found)
    outcome.seconds = time.monotonic() - started
    return outcome


def _drive(served: Cluster, plan: Plan, models: Models, outcome: Outcome) -> None:
    router = served._launched.connection
    assert isinstance(router, Router)
    saboteur = Saboteur(served, router, plan.faults)
    served.until(lambda: _healed(served, plan.shape))
    before = _with_transfers(_held(served), plan.shape)
    try:
        Traffic(served, plan, models, outcome).run(saboteur)
    finally:
        saboteur.stop()
        times = served.running.times.values()
        outcome.pauses = _pauses(saboteur.strikes, list(times), plan.shape)
        outcome.longest_gap = max((b - a for one in times for a, b in pairwise(one)), default=0.0)
        outcome.counters = served.supervisor.report().counters
    served.until(lambda: _healed(served, plan.shape))
    blocks = {"KV blocks": _blocks(served, router)}
    outcome.leaks = Leaks(blocks | growth(before, lambda: _held(served)).found)


def _healed(served: Cluster, shape: Shape) -> bool:
    """Every process serves, and every worker is connected to every server."""
    status = served.supervisor.status()
    clients = {one.stats.clients for one in status if one.role == SERVER}
    return all(one.stage == "serving" for one in status) and clients == {
        shape.attention_workers + shape.prefill_workers
    }


def _held(served: Cluster) -> dict[str, Counter[str]]:
    """What each process holds now."""
    status = served.supervisor.status()
    return {one.name: held_by(Path(f"/proc/{one.pid}")) for one in status if one.pid is not None}


def _with_transfers(held: dict[str, Counter[str]], shape: Shape) -> dict[str, Counter[str]]:
    """The same, with the connections that prefill workers make with their first requests."""
    partners = {WORKER: shape.prefill_workers, PREFILL: shape.attention_workers * (shape.prefill_workers > 0)}
    more = {name: partners.get(name.rpartition(" ")[0], 0) for name in held}
    return {name: counts + Counter(sockets=more[name], segments=more[name]) for name, counts in held.items()}


def _blocks(served: Cluster, router: Router) -> list[str]:
    """The used blocks of workers without requests. There must be none."""

    def idle() -> bool:
        stats = router.stats()
        return (stats.running, stats.waiting, stats.blocks.used) == (0, 0, 0)

    deadline = time.monotonic() + 5.0
    while not idle() and time.monotonic() < deadline:
        served.take(0.02)
    blocks = router.stats().blocks
    if idle() and blocks.free + blocks.cached == blocks.total:
        return []
    return [f"{router.stats()}"]


def _pauses(strikes: list[Strike], times: list[list[float]], shape: Shape) -> list[Pause]:
    found = []
    for strike, after in zip_longest(strikes, strikes[1:]):
        seconds = max((spanning_gap(one, strike.time) for one in times), default=0.0)
        alone = strike.alone and (after is None or after.time > strike.time + seconds)
        alone = alone and not shape.bad_connections
        fault = strike.fault
        found.append(Pause(fault.kind, fault.role, strike.victim, shape.min_replicas, seconds, alone))
    return found


@contextmanager
def _cluster(shape: Shape, model: str) -> Iterator[Cluster]:
    with (
        patch("moesaic.cluster.supervisor.FROZEN_SECONDS", FROZEN_SECONDS),
        patch(
            "moesaic.cluster.launcher.spawn_server",
            _over_tcp if shape.transport == "tcp" else local.spawn_server,
        ),
        _connections(shape),
        cluster(
            model,
            schedule=shape.schedule,
            inflight_batches=shape.inflight_batches,
            queue_policy=shape.queue_policy,
            attention_workers=shape.attention_workers,
            prefill_workers=shape.prefill_workers,
            expert_servers=shape.expert_servers,
            min_replicas=shape.min_replicas,
            redundant_experts=shape.redundant_experts,
            max_num_batched_tokens=shape.chunk,
            kernels=shape.kernels,
            combine=shape.combine,
            transport="auto" if shape.transport == "tcp" else shape.transport,
            tensor_parallel_size=shape.ranks,
        ) as served,
    ):
        yield served


def _connections(shape: Shape) -> AbstractContextManager[None]:
    """Wraps the connections of the workers that start inside the context."""
    if not shape.bad_connections:
        return nullcontext()
    return faulty(WORSE if shape.min_replicas > 1 and shape.schedule != "barrier" else BAD, seed=7)


def _over_tcp(config: ExpertServerConfig) -> ChildProcess:
    """Makes clients reach a server through TCP. On one host they then use sockets instead of shared
    memory."""
    return local.spawn_server(replace(config, address="tcp:127.0.0.1:0"))
