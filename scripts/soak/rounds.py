"""Runs rounds on a cluster: traffic and faults. Then looks for what they left behind."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise, zip_longest
from pathlib import Path

from scripts.soak.answers import difference, spanning_gap
from scripts.soak.clusters import cluster_of
from scripts.soak.faults import SETTINGS, Saboteur, Strike, running, sizes
from scripts.soak.leaks import Leaks, growth, held_by, holdings, left_over
from scripts.soak.models import Models
from scripts.soak.plan import SEVERAL, Order, Plan, orders, pool
from scripts.soak.shapes import PREFILL, SERVER, WORKER, Shape
from tests.support.cluster_driver import PATIENCE, Cluster

from moesaic.core.cluster_status import ClusterCounters
from moesaic.core.errors import MoesaicError
from moesaic.core.metrics import WorkerStats

SILENCE = 40.0
"""Seconds without a token after which a round is given up."""
ENDS = 15.0
"""Seconds in which what ended requests had has to be free."""


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
    exercised: dict[str, int] = field(default_factory=dict)
    """How often something happened that only some clusters do, by name."""
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
        [number] = self._served.submit([prompt], [replace(params, max_tokens=order.max_tokens)])
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


def run_rounds(
    plans: Sequence[Plan], models: Models, folder: Path, deadline: float = math.inf
) -> Iterator[Outcome]:
    """Runs rounds of one shape on one cluster. folder: an empty folder for temporary files.

    deadline: the moment, on the monotonic clock, after which no other round begins. A round that broke off
    ends the cluster, and the next one starts another. The last round of a cluster is told what the cluster
    left behind.
    """
    left = list(plans)
    while left and time.monotonic() < deadline:
        yield from _one_cluster(left, models, folder, deadline)


def _one_cluster(left: list[Plan], models: Models, folder: Path, deadline: float) -> Iterator[Outcome]:
    """Takes rounds from `left` until one breaks off."""
    shape = left[0].shape
    models.alone(shape)
    before, started = holdings(folder), time.monotonic()
    outcome: Outcome | None = None
    try:
        with cluster_of(shape, models.path(shape.model)) as served:
            while left and (outcome is None or (outcome.error is None and time.monotonic() < deadline)):
                if outcome is not None:
                    yield outcome
                plan = left.pop(0)
                outcome = Outcome(plan.seed, shape.name, plan.kind, shape.bad_connections)
                _run(served, plan, models, outcome)
                outcome.seconds, started = time.monotonic() - started, time.monotonic()
    except (AssertionError, MoesaicError, OSError) as error:  # it did not start, or did not end
        outcome = outcome or Outcome(left[0].seed, shape.name, left.pop(0).kind, shape.bad_connections)
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"
    assert outcome is not None
    outcome.leaks = Leaks(outcome.leaks.found | left_over(before, folder).found)
    outcome.seconds += time.monotonic() - started
    yield outcome


def _run(served: Cluster, plan: Plan, models: Models, outcome: Outcome) -> None:
    """Runs one round of the cluster."""
    saboteur = Saboteur(served, served.router, plan.faults, plan.shape)
    try:
        served.until(lambda: _healed(served, plan.shape))
        before = _with_transfers(_held(served), plan.shape)
        counted, stats = served.supervisor.report().counters, served.router.stats()
        served.forget()
        try:
            Traffic(served, plan, models, outcome).run(saboteur)
        finally:
            saboteur.stop()
            times = served.running.times.values()
            outcome.pauses = _pauses(saboteur.strikes, list(times), plan.shape)
            outcome.longest_gap = max((b - a for one in times for a, b in pairwise(one)), default=0.0)
            outcome.counters = _grown(counted, served.supervisor.report().counters)
            outcome.exercised = _exercised(saboteur, stats, served.router.stats())
        _restore(served, plan.shape)
        kept = {"KV, states, seats and transfers": _kept(served)}
        outcome.leaks = Leaks(kept | growth(before, lambda: _held(served)).found)
    except (AssertionError, MoesaicError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"


def _restore(served: Cluster, shape: Shape) -> None:
    """Brings every role back to its usual number of processes, and waits until all of them serve."""
    deadline = time.monotonic() + PATIENCE
    usual = {role: number for role, number in sizes(shape).items() if role != PREFILL or number}
    while any(running(served)[role] != number for role, number in usual.items()):
        assert time.monotonic() < deadline, f"not as it was: {served.supervisor.report()}"
        settings = {SETTINGS[role]: number for role, number in usual.items()}
        change = served.supervisor.scale(**settings)
        served.until(change.done)
    served.until(lambda: _healed(served, shape))


def _healed(served: Cluster, shape: Shape) -> bool:
    """Every role has its usual number of processes, all serve, and each worker is connected to every
    server."""
    status = served.supervisor.status()
    clients = {one.stats.clients for one in status if one.role == SERVER}
    alike = running(served) == Counter(sizes(shape))
    workers = shape.attention_workers + shape.prefill_workers
    return alike and all(one.stage == "serving" for one in status) and clients == {workers}


def _grown(before: ClusterCounters, after: ClusterCounters) -> ClusterCounters:
    """What was counted meanwhile."""
    names = [one.name for one in fields(ClusterCounters)]
    return ClusterCounters(**{name: getattr(after, name) - getattr(before, name) for name in names})


def _exercised(saboteur: Saboteur, before: WorkerStats, after: WorkerStats) -> dict[str, int]:
    """What happened in the round by these counters, of the workers and of the faults."""
    return {
        "KV received": after.transfers.received_requests - before.transfers.received_requests,
        "KV not received": after.transfers.failed_transfers - before.transfers.failed_transfers,
        "prefill workers killed in a transfer": saboteur.in_transfer,
        "changes of size": saboteur.resized,
        "changes of size given up": len(saboteur.not_resized),
        "drafted tokens checked": after.speculation.draft_tokens - before.speculation.draft_tokens,
        "drafted tokens accepted": after.speculation.accepted_tokens - before.speculation.accepted_tokens,
        "preemptions": after.preemptions - before.preemptions,
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


def _kept(served: Cluster) -> list[str]:
    """What workers without requests still hold of them. There must be nothing."""

    def free() -> bool:
        stats = served.router.stats()
        blocks, held = stats.blocks, (stats.running, stats.waiting, stats.blocks.num_used)
        held += (stats.states.seats_used, stats.transfers.held_bytes)
        return (
            not any(held)
            and not served.router.transfers
            and blocks.num_free + blocks.num_cached == blocks.num_total
        )

    deadline = time.monotonic() + ENDS
    while not free() and time.monotonic() < deadline:
        served.take(0.02)
    return [] if free() else [f"{served.router.stats()}, transfers {served.router.transfers}"]


def _pauses(strikes: list[Strike], times: list[list[float]], shape: Shape) -> list[Pause]:
    found = []
    for strike, after in zip_longest(strikes, strikes[1:]):
        seconds = max((spanning_gap(one, strike.time) for one in times), default=0.0)
        alone = strike.alone and (after is None or after.time > strike.time + seconds)
        alone = alone and not shape.bad_connections
        fault = strike.fault
        found.append(Pause(fault.kind, fault.role, strike.victim, shape.min_replicas, seconds, alone))
    return found
