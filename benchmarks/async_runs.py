"""How many runs of the asynchronous schedule are partial, and what its scheduler costs: in virtual time.

The scheduler objects of attention workers and expert servers are the real ones. The devices are modelled by a
file of `--paced`, without dilation, and nothing is computed. A run is partial if it has fewer rows than its
worker has decodes in flight: these rows went on without the others.

    python benchmarks/async_runs.py --skew 0.75 --decodes 128 --model mixtral
    python benchmarks/async_runs.py --rounds 5                 # all models, the least CPU time of five rounds

Routing: top-k without replacement. With --skew, the experts of one server get that share of a layer's pairs,
another server's in each layer (`--hot alternating`) or always the same (`persistent`).

The scheduler's cost is CPU time for a layer of all rows of a worker: of parts that come and runs that begin,
and, separately, of the ends of steps (tokens are added, the next step is planned), shared out among layers.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from moesaic.core import paced_devices
from moesaic.core.curves import DeviceCurves, Thresholds
from moesaic.core.request import Request, SamplingParams
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import make_policy
from moesaic.policy.scheduling.minimum_batch import Decisions
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Event,
    Forget,
    PartsArrived,
    RequestsArrived,
    RunSegment,
    SegmentDone,
    StepDone,
)
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, Run, WaitForSmallCalls

PAPER = Path(__file__).parent / "papers" / "async_moe.toml"
MODELS = {"mixtral": (32, 8, 2), "qwen3-moe": (48, 128, 8), "deepseek-v2-lite": (26, 64, 6)}
"""Name -> layers with routed experts, experts of a layer, top_k."""
PROMPT = 1
"""Tokens of every prompt."""


@dataclass(frozen=True)
class Setting:
    """One simulated cluster."""

    model: tuple[int, int, int] = MODELS["mixtral"]
    workers: int = 4
    servers: int = 4
    decodes: int = 128
    """Requests of each worker."""
    tokens: int = 3
    """Tokens of each request."""
    skew: float = 0.0
    """Share of the pairs that the hot server gets. 0: routing is even."""
    persistent: bool = False
    """Whether the same server is hot in each layer."""
    seed: int = 0


@dataclass
class Found:
    """What was counted of the runs of decodes, over all workers."""

    runs: int = 0
    partial: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Virtual seconds until all requests had ended."""
    cpu: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """CPU seconds of the workers' scheduler for each event of decodes, by the kinds of event and run."""

    @property
    def share(self) -> float:
        """Share of the runs that are partial."""
        return self.partial / max(1, self.runs)

    def cost(self, ends: bool) -> float:
        """CPU seconds of the scheduler at the ends of steps, or at all other events.

        The median of each kind of event counts for all of it, since other processes disturb a few.
        """
        kinds = [times for (event, _), times in self.cpu.items() if ends == (event == "StepDone")]
        return sum(len(times) * float(np.median(times)) for times in kinds)


class Clock:
    """Virtual time: actions in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), action))

    def run(self) -> None:
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()


class Cluster:
    """Workers and servers of a setting."""

    def __init__(self, setting: Setting, devices: paced_devices.PacedDevices) -> None:
        _, experts, top_k = setting.model
        self.setting, self.link, self.clock = setting, devices.link, Clock()
        self.curves: DeviceCurves = devices.curves
        self.decisions = Decisions(self.curves, experts, top_k)
        self.random = np.random.default_rng(setting.seed)
        self.found = Found()
        self.servers = [Server(self, number) for number in range(setting.servers)]
        self.workers = [Worker(self, number) for number in range(setting.workers)]

    def logits(self, layer: int) -> np.ndarray:
        """[E] logarithms of the experts' shares in a layer."""
        setting = self.setting
        _, experts, _ = setting.model
        shares = np.ones(experts)
        if setting.skew:
            hot = self.server_of(np.arange(experts)) == (0 if setting.persistent else layer % setting.servers)
            shares[hot] = setting.skew / hot.sum()
            shares[~hot] = (1 - setting.skew) / max(1, (~hot).sum())
        return np.asarray(np.log(np.maximum(shares, 1e-9)))

    def server_of(self, experts: IntArray) -> IntArray:
        return experts * self.setting.servers // self.setting.model[1]

    def run(self) -> Found:
        for worker in self.workers:
            worker.begin()
        self.clock.run()
        self.found.seconds = self.clock.now
        return self.found


class Worker:
    """An attention worker. Parts of answers that come during a run are told at its end."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        layers, _, top_k = cluster.setting.model
        decodes = cluster.setting.decodes
        self.cluster, self.number = cluster, number
        self.layers, self.top_k, self.decodes = layers, top_k, decodes
        limits = BatchLimits(decodes, max(2048, PROMPT * decodes), 64)
        policy = make_policy("defrag", urgency=0.1)
        self.scheduler = AsyncScheduler(
            limits, KVBlocks(4 * decodes, 16), policy, layers, top_k, cluster.decisions
        )
        self.busy = False
        self.parts: list[tuple[int, IntArray]] = []
        self.missing: dict[int, int] = {}
        """Run -> pairs without an answer."""
        self.counting = False

    def begin(self) -> None:
        params = SamplingParams(max_tokens=self.cluster.setting.tokens)
        requests = [Request(one, [1] * PROMPT, params) for one in range(self.decodes)]
        self.tell(RequestsArrived(requests))

    def tell(self, event: Event) -> None:
        began = time.thread_time()
        actions = self.scheduler.handle(event, self.cluster.clock.now)
        took = time.thread_time() - began
        if self.counting:
            runs = [action for action in actions if isinstance(action, RunSegment)]
            begun = f"run of {len(runs[0].sources)} sources" if runs else "no run"
            kind = type(event).__name__, begun
            self.cluster.found.cpu.setdefault(kind, []).append(took)
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Forget):
            for run in action.runs:
                self.missing.pop(run, None)
        if not isinstance(action, RunSegment):
            return
        self.busy = True
        rows, found = action.plan.batch.num_rows, self.cluster.found
        if rows == action.plan.batch.num_sequences:
            self.counting = True
            found.runs += 1
            found.rows += rows
            found.partial += rows < self.scheduler._decodes
        self.cluster.clock.later(
            self.cluster.curves.attention.seconds(rows), lambda: self.computed(action, rows)
        )

    def computed(self, action: RunSegment, rows: int) -> None:
        plan, last = action.plan, action.segment == self.layers
        if not last:
            self.send(plan.step, action.segment, rows)
        parts, self.parts = self.parts, []
        if parts:
            self.tell(PartsArrived(parts))
        self.busy = False
        if last:
            self.cluster.found.tokens += len(plan.sampled_sequences)
            self.tell(StepDone(plan.step, np.full(len(plan.sampled_sequences), 1)))
        else:
            self.tell(SegmentDone(plan.step))

    def send(self, run: int, layer: int, rows: int) -> None:
        """Send the pairs of a run to their servers."""
        cluster = self.cluster
        noise = cluster.logits(layer) + cluster.random.gumbel(size=(rows, cluster.setting.model[1]))
        experts = np.argpartition(-noise, self.top_k - 1, axis=1)[:, : self.top_k].reshape(-1)
        self.missing[run] = len(experts)
        servers = cluster.server_of(experts)
        for number in np.unique(servers).tolist():
            pairs = np.flatnonzero(servers == number)
            call = Call(self, run, rows, pairs, experts[pairs])
            cluster.clock.later(cluster.link.latency, partial(cluster.servers[number].take, layer, call))

    def answered(self, call: Call, pairs: IntArray) -> None:
        """A part of an answer has come."""
        self.missing[call.run] -= len(pairs)
        if call.rows > self.cluster.decisions.partial_answer_rows:
            self.parts.append((call.run, pairs))
        elif not self.missing[call.run]:
            self.parts.append((call.run, np.arange(call.rows * self.top_k)))
        if not self.busy and self.parts:
            parts, self.parts = self.parts, []
            self.tell(PartsArrived(parts))


@dataclass(frozen=True, eq=False)
class Call:
    """The pairs of a run for one server."""

    worker: Worker
    run: int
    rows: int
    """Rows of the run."""
    pairs: IntArray
    experts: IntArray


@dataclass(eq=False)
class Server:
    """An expert server."""

    cluster: Cluster
    number: int
    busy: bool = False
    calls: dict[int, Call] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        decisions, (layers, experts, _) = self.cluster.decisions, self.cluster.setting.model
        held = -(-experts // self.cluster.setting.servers)
        rule = WaitForSmallCalls(decisions.min_call_pairs(held), 0.1, 3.0)
        groups = experts if decisions.has_expert_queues else 1
        policy = make_policy("defrag")
        self.scheduler = ExpertServerScheduler(
            range(layers), policy, rule, groups, decisions.queue_runs_alone
        )
        for client in range(self.cluster.setting.workers):
            self.scheduler.client_joined(client)

    def take(self, layer: int, call: Call) -> None:
        number = next(self.numbers)
        self.calls[number] = call
        client = call.worker.number
        self.scheduler.client_joined(client)
        self.scheduler.add_call(number, client, layer, call.experts, self.cluster.clock.now)
        self.go_on()

    def go_on(self) -> None:
        if self.busy:
            return
        now = self.cluster.clock.now
        run = self.scheduler.next_run(now)
        if run is not None:
            self.busy = True
            experts = [self.calls[call].experts[pairs] for call, pairs in run.parts]
            chosen, pairs = len(np.unique(np.concatenate(experts))), sum(map(len, experts))
            self.cluster.clock.later(
                self.cluster.curves.experts.seconds(pairs, chosen), lambda: self.computed(run)
            )
        elif (patience := self.scheduler.wait(now)) is not None:
            self.cluster.clock.later(max(patience, 1e-9), self.go_on)

    def computed(self, run: Run) -> None:
        self.busy = False
        for number, pairs in run.parts:
            call = self.calls[number]
            answer = partial(call.worker.answered, call, call.pairs[pairs])
            self.cluster.clock.later(self.cluster.link.latency, answer)
        self.go_on()


def simulate(setting: Setting, devices: paced_devices.PacedDevices) -> Found:
    """Run a cluster until all of its requests have ended."""
    return Cluster(setting, devices).run()


def line(name: str, setting: Setting, found: Found) -> str:
    layers = found.rows / setting.decodes
    """Layers of all rows of a worker, over all workers."""
    layer, ends = 1e3 * found.cost(False) / layers, 1e3 * found.cost(True) / layers
    return (
        f"{name:18} {setting.decodes:4} decodes, skew {setting.skew:4.0%}: {found.runs:6} runs, "
        f"{found.share:5.1%} partial, {found.rows / max(1, found.runs):6.1f} rows a run, "
        f"{found.tokens / found.seconds:6.0f} tokens/s; scheduler {layer:.3f} ms a layer, "
        f"and {ends:.3f} at the ends of steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=Path, default=PAPER, help="file of --paced")
    parser.add_argument("--model", choices=list(MODELS), nargs="*", default=list(MODELS))
    parser.add_argument("--decodes", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--skew", type=float, nargs="*", default=[0.0, 0.75])
    parser.add_argument("--hot", choices=["alternating", "persistent"], default="alternating")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument(
        "--separate-rows", type=int, help="in place of the curves: 1 never waits, 9999 always"
    )
    parser.add_argument("--waited-pairs", type=int, help="in place of the curves")
    parser.add_argument("--queue-pairs", type=int, help="in place of the curves")
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="the round with the least CPU time is shown")
    args = parser.parse_args()
    devices = paced_devices.read(args.devices)
    told = None if args.separate_rows is None else 0
    given = Thresholds(args.separate_rows, told, args.waited_pairs, args.queue_pairs)
    undilated = replace(
        devices, dilation=1.0, thresholds=devices.thresholds if given == Thresholds() else given
    )
    for name, decodes, skew in itertools.product(args.model, args.decodes, args.skew):
        persistent = args.hot == "persistent"
        setting = Setting(MODELS[name], args.workers, args.servers, decodes, args.tokens, skew, persistent)
        rounds = [simulate(setting, undilated) for _ in range(args.rounds)]
        print(line(name, setting, min(rounds, key=lambda one: one.cost(False))), flush=True)


if __name__ == "__main__":
    main()
