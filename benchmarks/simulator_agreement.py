"""Does the simulation of a cluster give the throughput and the latencies of real processes?

    python benchmarks/simulator_agreement.py                    # twenty scenarios, about twelve minutes
    python benchmarks/simulator_agreement.py --only 0 11 --dilation 60

Each scenario runs twice. Real processes of `moesaic serve` compute the demo checkpoint on modelled devices
(--paced), whose times are dilated so that a few cores suffice. The simulation gets the same curves, the same
requests at the same times, the same placement of experts, and how often the checkpoint's tokens choose each
expert. Both measure after a warm-up; times of the processes are divided by the dilation.

    late    runs of real processes that took longer than the modelled device. Above 2 % the line says
            nothing: take a larger --dilation, or a machine that does nothing else
    ratio   simulated / real

With --fit one number is fitted, on half of the scenarios: what a worker's process needs for each event beside
its device (event_us). The other half judges it. Each half has every schedule and every load.
Not alike by construction: a real link carries the rows of each connection one after another, in both
directions together. A simulated one carries those of each device. So links are fast here.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from agreement_cases import (
    BATCHED,
    BLOCK,
    CASES,
    LENGTHS,
    LONGEST,
    MODEL,
    SCHEDULES,
    SEATS,
    URGENCY,
    Case,
    Setting,
    params,
    profile,
    prompts,
)

from moesaic.cluster.launch import LaunchedEngine, launch
from moesaic.commands.plan import find_model
from moesaic.config import (
    CacheConfig,
    ClusterConfig,
    ModelConfig,
    QueueConfig,
    SchedulerConfig,
    WorkerConfig,
)
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.front import generate_items

LATE = 0.02
"""Share of late runs from which a measurement says nothing."""
NEAR = 0.10
"""Difference that is aimed at."""
EVENT_US = (0.0, 50.0, 150.0, 400.0)
"""Microseconds of the devices' time that are tried for a worker's events."""
PATIENCE = 120.0
"""Seconds after which a cluster that has not started counts as failed."""


@dataclass(frozen=True)
class Measured:
    """What one side measured, in the devices' time."""

    throughput: float
    itl: float
    """Median, seconds."""
    late: float = 0.0
    gone: int = 0
    """Servers that real workers gave up."""


# ---- the real processes


@contextmanager
def processes(setting: Setting, case: Case) -> Iterator[LaunchedEngine]:
    """The cluster of a case, whose workers are connected to all servers."""
    worker = WorkerConfig(
        ModelConfig(MODEL, max_model_len=LONGEST, threads=1),
        CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        SchedulerConfig(SEATS, BATCHED, case.schedule, case.inflight),  # type: ignore[arg-type]
        queues=QueueConfig(queue_urgency=URGENCY * setting.dilation if case.schedule == "async" else None),
    )
    cluster = ClusterConfig(
        attention_workers=case.workers,
        expert_servers=case.servers,
        placement=str(setting.placement(case)),
        rebalance_interval=0,
        paced=str(setting.paced(case)),
        dispatch="round-robin",
    )
    with launch(worker, cluster, seed=0) as launched:
        supervisor, until = launched.supervisor, time.monotonic() + PATIENCE
        assert supervisor is not None

        def ready() -> bool:
            servers = [one for one in supervisor.status() if one.role == "expert server"]
            met = all(one.stats.clients == case.workers for one in servers)
            return launched.engine.info is not None and met and len(servers) == case.servers

        while not ready():
            assert time.monotonic() < until, f"it did not start: {supervisor.status()}"
            message = launched.connection.receive(0.05)
            if message is not None:
                launched.engine.receive(message)  # type: ignore[arg-type]
        yield launched


class Driver:
    """Sends the requests of a case, and notes when tokens come, in the devices' time."""

    def __init__(self, setting: Setting, case: Case, launched: LaunchedEngine) -> None:
        self._setting, self._launched = setting, launched
        self._items = generate_items(setting.scenario(case))
        self._next = next(self._items, None)
        self._clients = case.load.get("clients")
        self._prompts = iter(prompts(np.full(20_000, LENGTHS["prompt"][1]).tolist(), setting.seed))
        self._began = 0.0
        self.times: dict[int, list[float]] = {}

    @property
    def now(self) -> float:
        return (time.monotonic() - self._began) / self._setting.dilation

    def run(self) -> None:
        """Run the whole duration."""
        self._began = time.monotonic()
        for _ in range(self._clients or 0):
            self._submit()
        while self.now < self._setting.seconds:
            due = self._setting.seconds
            if self._clients is None and self._next is not None:
                due = min(due, self._next.arrival)
                if self._next.arrival <= self.now:
                    self._submit()
                    continue
            self._take((due - self.now) * self._setting.dilation)

    def _submit(self) -> None:
        assert self._next is not None
        item, self._next = self._next, next(self._items, None)
        prompt = next(self._prompts)[: item.prompt]
        number = self._launched.engine.submit(prompt, params(item.answer, len(self.times)))
        self.times[number] = []

    def _take(self, seconds: float) -> None:
        message = self._launched.connection.receive(max(0.0, seconds))
        if message is None:
            return
        now = self.now
        for output in self._launched.engine.receive(message):  # type: ignore[arg-type]
            self.times[output.request_id] += [now] * len(output.token_ids)
            if output.finished and self._clients is not None:
                self._submit()

    def measured(self, late: float, gone: int) -> Measured:
        """Throughput and median latency between tokens, after the warm-up."""
        begin, end = self._setting.warm_up, self._setting.seconds
        tokens, gaps = 0, [0.0][:0]
        for given in self.times.values():
            times = np.array(given)
            inside = (times >= begin) & (times <= end)
            tokens += int(np.count_nonzero(inside))
            gaps += np.diff(times)[inside[1:]].tolist()
        return Measured(tokens / (end - begin), float(np.median(gaps)) if gaps else math.nan, late, gone)


def real(setting: Setting, case: Case) -> Measured:
    """Run a case with real processes."""
    with processes(setting, case) as launched:
        driver = Driver(setting, case, launched)
        driver.run()
        assert launched.supervisor is not None
        time.sleep(0.5)  # the last statistics come a moment later
        while (message := launched.connection.receive(0.0)) is not None:
            launched.engine.receive(message)  # type: ignore[arg-type]
        found = launched.supervisor.report().counters
        return driver.measured(found.paced_late / max(1, found.paced_runs), found.failovers)


def simulated(setting: Setting, case: Case, event_us: float) -> Measured:
    """Run a case in virtual time."""
    figures = SimulatedCluster(setting.scenario(case, event_us), find_model(MODEL)).run()
    return Measured(figures.throughput, figures.itl.percentiles.get("p50", math.nan))


# ---- the comparison


@dataclass(frozen=True)
class Line:
    """One scenario on both sides."""

    number: int
    case: Case
    real: Measured
    simulated: Measured

    @property
    def fits(self) -> bool:
        """Whether it is in the half that is fitted."""
        return (self.number + self.number // len(SCHEDULES)) % 2 == 0

    @property
    def ratios(self) -> tuple[float, float]:
        """Simulated / real: throughput, and median latency between tokens."""
        return self.simulated.throughput / self.real.throughput, self.simulated.itl / self.real.itl

    @property
    def off(self) -> float:
        """The larger difference of the two ratios from 1."""
        return max(abs(ratio - 1) for ratio in self.ratios)

    def text(self) -> str:
        rate, itl = self.ratios
        gone = f"  {self.real.gone} servers given up" if self.real.gone else ""
        return (
            f"{self.number:2} {self.case.describe():62} late {self.real.late:6.2%}"
            f"  tokens/s {self.real.throughput:7.1f} {self.simulated.throughput:7.1f} {rate:5.2f}"
            f"  ITL ms {1e3 * self.real.itl:6.1f} {1e3 * self.simulated.itl:6.1f} {itl:5.2f}{gone}"
        )


def fitted(setting: Setting, lines: Sequence[Line]) -> float:
    """The event_us with the least squares of the ratios' logarithms, over these scenarios."""

    def error(event_us: float) -> float:
        again = [replace(one, simulated=simulated(setting, one.case, event_us)) for one in lines]
        return sum(math.log(ratio) ** 2 for one in again for ratio in one.ratios)

    return min(EVENT_US, key=error)


def summary(lines: Sequence[Line]) -> str:
    """How many scenarios are near, of those that were not late."""
    good = [one for one in lines if one.real.late <= LATE]
    near = sum(one.off <= NEAR for one in good)
    worst = max((one.off for one in good), default=math.nan)
    return (
        f"{near} of {len(good)} within {NEAR:.0%}, worst {worst:.1%}; "
        f"{len(lines) - len(good)} of {len(lines)} were late"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", type=int, default=list(range(len(CASES))), help="scenarios")
    parser.add_argument("--seconds", type=float, default=1.8, help="of the devices' time")
    parser.add_argument("--warm-up", type=float, default=0.5, help="the first of them, not measured")
    parser.add_argument("--dilation", type=float, default=16.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fit", action="store_true", help="fit event_us on every second scenario")
    parser.add_argument("--json", action="store_true", help="one JSON object a scenario")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), options.seconds, options.warm_up, options.dilation, options.seed)
        profile(setting)
        lines: list[Line] = []
        for number in options.only:
            case = CASES[number]
            lines.append(Line(number, case, real(setting, case), simulated(setting, case, 0.0)))
            print(json.dumps(asdict(lines[-1])) if options.json else lines[-1].text(), flush=True)
        print(f"event_us = 0, all scenarios: {summary(lines)}")
        if options.fit:
            chosen = fitted(setting, [one for one in lines if one.fits and one.real.late <= LATE])
            judged = [
                replace(one, simulated=simulated(setting, one.case, chosen)) for one in lines if not one.fits
            ]
            print(f"event_us = {chosen:g}, fitted on half of the scenarios; the other half:")
            for one in judged:
                print(one.text())
            print(summary(judged))


if __name__ == "__main__":
    main()
