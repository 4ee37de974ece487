"""What is measured of a simulated cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moesaic.planning.sim.connection import Call
from moesaic.policy.scheduling.schedulers.server_setup import SEPARATE

if TYPE_CHECKING:
    from moesaic.planning.sim.cluster import SimulatedCluster

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


@dataclass
class _Snapshot:
    """Counters at one moment."""

    time: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, Counter[str]] = field(default_factory=dict)
    sending: dict[str, float] = field(default_factory=dict)
    channels: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """(from host, to host) -> bytes and seconds so far."""
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    server_pairs: dict[int, int] = field(default_factory=dict)
    in_flight: float = 0.0


def _host_links(begin: _Snapshot, end: _Snapshot) -> dict[str, dict[str, HostLink]]:
    """What went from host to host between two snapshots."""
    host_links: dict[str, dict[str, HostLink]] = {}
    for (sender, receiver), (size, busy) in sorted(end.channels.items()):
        size_before, busy_before = begin.channels.get((sender, receiver), (0, 0.0))
        share = (busy - busy_before) / (end.time - begin.time)
        host_links.setdefault(sender, {})[receiver] = HostLink(size - size_before, share)
    return host_links


def _share(counts: Counter[str]) -> float:
    """Share of the runs that were partial."""
    return counts["partial_runs"] / max(1, counts["runs"])


class Record:
    """Counts while the cluster runs."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._began = _Snapshot()
        self._samples: list[Sample] = []
        self._tokens = 0
        self._times = [0.0] * 4
        self._pairs = 0

    def begin(self) -> None:
        """The warm-up is over."""
        self._began = self._snapshot()
        self._times, self._pairs = [0.0] * 4, 0

    def record_answer(self, call: Call, now: float) -> None:
        """A worker has the whole answer of a call."""
        pairs, times = len(call.pairs), self._times
        times[0] += pairs * (call.arrival_time - call.send_time)
        times[1] += pairs * (call.begin_time - call.arrival_time)
        times[2] += pairs * (call.end_time - call.begin_time)
        times[3] += pairs * (now - call.end_time)
        self._pairs += pairs

    def sample(self) -> None:
        """Look at the queues."""
        cluster = self._cluster
        stats = [worker.scheduler.stats() for worker in cluster.workers]
        pairs = sum(server.waiting_pairs for server in cluster.fleet.servers.values() if server.alive)
        tokens, now = sum(len(life.times) for life in cluster.front.lives), cluster.timeline.now
        last_time = self._samples[-1].time if self._samples else 0.0
        rate = (tokens - self._tokens) / (now - last_time)
        self._tokens = tokens
        waiting, running = sum(stat.waiting for stat in stats), sum(stat.running for stat in stats)
        self._samples.append(Sample(now, waiting, running, pairs, rate))

    def _snapshot(self) -> _Snapshot:
        cluster, now = self._cluster, self._cluster.timeline.now
        cluster.front.settle()
        stats = [worker.scheduler.stats() for worker in cluster.workers]
        executors = [worker.executor for worker in cluster.workers]
        counts = Counter(
            runs=sum(item.steps for item in stats),
            partial_runs=sum(item.partial_runs for item in stats),
            run_rows=sum(item.run_rows for item in executors),
            segments=sum(item.segments for item in executors),
            server_runs=sum(server.runs for server in cluster.fleet.all_servers),
        )
        idle = {f"attention worker {i}": worker.idle.seconds for i, worker in enumerate(cluster.workers)}
        pairs: Counter[int] = Counter()
        for server in cluster.fleet.all_servers:
            name = f"expert server {server.number}"
            past_seconds = idle.get(name, {})
            causes = server.idle.seconds
            idle[name] = past_seconds | {
                cause: past_seconds.get(cause, 0.0) + s for cause, s in causes.items()
            }
            pairs[server.number] += int(server.load.sum())
        return _Snapshot(
            time=now,
            busy={name: device.busy_until(now) for name, device in cluster.hardware.items()},
            sent_bytes={name: Counter(stream.sent_bytes) for name, stream in cluster.streams.items()},
            sending={name: stream.busy for name, stream in cluster.streams.items()},
            channels={} if cluster.links is None else cluster.links.measure_traffic(),
            idle=idle,
            counts=counts,
            server_pairs=dict(pairs),
            in_flight=cluster.front.in_flight_seconds,
        )

    def figures(self) -> Figures:
        """The measurement up to now."""
        cluster, begin, end = self._cluster, self._began, self._snapshot()
        span = end.time - begin.time
        counts = end.counts - begin.counts
        pairs = {
            number: end.server_pairs[number] - begin.server_pairs.get(number, 0)
            for number in end.server_pairs
        }
        stats = [worker.executor.experts.replicas.stats for worker in cluster.workers]
        schedule = cluster.scenario.schedule.kind
        times = [item / max(1, self._pairs) for item in self._times]
        return Figures(
            model=cluster.model,
            devices=cluster.devices.source,
            schedule=schedule,
            seconds=span,
            **self._latencies(begin.time, span),
            in_flight=(end.in_flight - begin.in_flight) / span,
            preemptions=sum(worker.scheduler.stats().preemptions for worker in cluster.workers),
            rows_per_run=counts["run_rows"] / max(1, counts["segments"]),
            pairs_per_run=sum(pairs.values()) / max(1, counts["server_runs"]),
            partial_runs=_share(counts) if schedule in SEPARATE else None,
            call=CallTimes(*times),
            utilisation={name: (busy - begin.busy.get(name, 0.0)) / span for name, busy in end.busy.items()},
            idle={
                name: {
                    cause: (idle_seconds - begin.idle.get(name, {}).get(cause, 0.0)) / span
                    for cause, idle_seconds in causes.items()
                }
                for name, causes in end.idle.items()
            },
            link_bytes={
                name: dict(sent_bytes - begin.sent_bytes.get(name, Counter()))
                for name, sent_bytes in end.sent_bytes.items()
            },
            link_utilisation={
                name: (busy - begin.sending.get(name, 0.0)) / span for name, busy in end.sending.items()
            },
            host_links=_host_links(begin, end),
            expert_load=[pairs[number] for number in sorted(pairs)],
            failovers=sum(item.failovers for item in stats),
            silent_failovers=sum(item.silent_failovers for item in stats),
            resent_pairs=sum(item.resent_pairs for item in stats),
            changes=cluster.fleet.changes,
            samples=self._samples,
            events=cluster.timeline.events,
        )

    def _latencies(self, begin: float, span: float) -> dict[str, Any]:
        """The figures of requests and tokens, as fields of `Figures`."""
        front = self._cluster.front
        tokens, itl, ttft, tpot, queue_seconds, good, num_completed = 0, [], [], [], [], 0, 0
        for life in front.lives:
            times = np.array(life.times)
            in_measurement = times >= begin
            tokens += int(np.count_nonzero(in_measurement))
            itl.append(np.diff(times)[in_measurement[1:]])
            if not in_measurement.any():
                continue
            first = life.times[0] - life.request.arrival
            mean = (life.times[-1] - life.times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
            if in_measurement[0]:
                ttft.append(first)
                queue_seconds.append(life.queue_seconds or 0.0)
            if life.has_ended:
                num_completed += 1
                tpot += [mean] if len(times) > 1 else []
                good += self._good(first, mean)
        has_objectives = front.slo_ttft is not None or front.slo_itl is not None
        return {
            "requests": sum(life.request.arrival >= begin for life in front.lives),
            "completed": num_completed,
            "tokens": tokens,
            "throughput": tokens / span,
            "goodput": good / span if has_objectives else None,
            "good_share": good / max(1, num_completed) if has_objectives else None,
            "queue_seconds": Spread.from_values(queue_seconds),
            "ttft": Spread.from_values(ttft),
            "tpot": Spread.from_values(tpot),
            "itl": Spread.from_values([] if not itl else np.concatenate(itl).tolist()),
        }

    def _good(self, first: float, mean: float) -> bool:
        front = self._cluster.front
        return (front.slo_ttft is None or first <= front.slo_ttft) and (
            front.slo_itl is None or mean <= front.slo_itl
        )
