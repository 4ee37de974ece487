"""The engine's side: requests that arrive, the worker of each, and when their tokens come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.messages import Submit
from moesaic.core.request import Request, SamplingParams
from moesaic.jobs.bench.lengths import read_trace
from moesaic.planning.sim.executor import TOKEN
from moesaic.planning.sim.scenario import Scenario, WorkloadTable
from moesaic.planning.sim.timeline import Timeline
from moesaic.planning.sim.worker import SimulatedWorker
from moesaic.policy.placement.dispatch import Dispatch, WorkerLoad
from moesaic.policy.scheduling.schedulers.actions import Admit, Emit

MAX_TRACE_ROWS = 1 << 40
"""More rows than a recorded workload has."""


@dataclass(frozen=True)
class Item:
    """A request to come."""

    arrival: float
    prompt: int
    answer: int


@dataclass(eq=False)
class Life:
    """A request and what became of it."""

    request: Request
    worker: int
    blocks: int = 0
    """KV blocks that its tokens fill at its worker."""
    queue_seconds: float | None = None
    """Seconds until it was admitted. None while it waits."""
    times: list[float] = field(default_factory=list)
    """When each token came."""
    has_ended: bool = False


@lru_cache(maxsize=4096)
def _params(answer: int) -> SamplingParams:
    return SamplingParams(max_tokens=answer, ignore_eos=True, seed=0)


@lru_cache(maxsize=4096)
def _prompt(tokens: int) -> list[int]:
    # Requests of equal length share a list, since nothing changes it.
    return [TOKEN] * tokens


def generate_items(scenario: Scenario) -> Iterator[Item]:
    """The requests of a workload, by ascending arrivals. Those of closed clients arrive when they may."""
    work, rng = scenario.workload, np.random.default_rng([scenario.seed, 1])
    if work.kind == "trace":
        yield from _read_recorded_items(scenario, work)
        return
    now, count = 0.0, 0
    while work.requests is None or count < work.requests:
        if work.rate is not None:
            now += float(rng.exponential(1 / work.rate))
        if now > scenario.duration:
            return
        prompt, answer = (
            int(rng.integers(low, high, endpoint=True)) for low, high in (work.prompt, work.answer)
        )
        yield Item(now, prompt, answer)
        count += 1


def _read_recorded_items(scenario: Scenario, work: WorkloadTable) -> Iterator[Item]:
    assert work.file is not None
    try:
        rows = read_trace(scenario.path(work.file), work.requests or MAX_TRACE_ROWS, work.speed)
    except ConfigError as error:
        raise ConfigError("workload.file" + str(error).removeprefix("--trace")) from error
    for row in rows:
        if row.arrival > scenario.duration:
            return
        if row.input_tokens + row.output_tokens > scenario.workers.max_model_len:
            longest = row.input_tokens + row.output_tokens
            allowed_values = f"at least {longest}, a request of workload.file"
            raise ConfigError.field("workers.max_model_len", scenario.workers.max_model_len, allowed_values)
        yield Item(row.arrival, row.input_tokens, row.output_tokens)


class Front:
    """Sends each request to a worker, as `cluster.router.Router` does, and notes its tokens."""

    def __init__(
        self,
        timeline: Timeline,
        dispatch: Dispatch,
        block_size: int,
        total_blocks: int,
        num_clients: int | None,
    ) -> None:
        """num_clients: clients that send a request once theirs is answered. None: there are none."""
        self.lives: list[Life] = []
        self.in_flight = 0
        self.in_flight_seconds = 0.0
        """Requests in flight, summed over time."""
        self.missed_tokens = 0
        """First and later tokens that came later than the objectives allow."""
        self.slo_ttft: float | None = None
        self.slo_itl: float | None = None
        self._timeline = timeline
        self._dispatch = dispatch
        self._block_size = block_size
        self._total_blocks = total_blocks
        self._num_clients = num_clients
        self._workers: list[SimulatedWorker] = []
        self.lost_workers: set[int] = set()
        """Numbers of the workers that died and have no new process."""
        self._requests: list[int] = []
        self._blocks: list[int] = []
        self._items: Iterator[Item] = iter(())
        self._last_count_time = 0.0

    def begin(self, workers: list[SimulatedWorker], items: Iterator[Item]) -> None:
        """Let the requests come."""
        self._workers, self._items = workers, items
        self._requests, self._blocks = [0] * len(workers), [0] * len(workers)
        if self._num_clients is None:
            self._set_next()
        else:
            for _ in range(self._num_clients):
                self._next_now()

    def reports(self, worker: int) -> WorkerReports:
        """What a worker reports to."""
        return WorkerReports(self, worker)

    def settle(self) -> None:
        """Count the requests in flight up to now."""
        now = self._timeline.now
        self.in_flight_seconds += self.in_flight * (now - self._last_count_time)
        self._last_count_time = now

    def record_admissions(self, action: Admit) -> None:
        """Requests have joined a batch."""
        for request, seconds, epoch in zip(action.requests, action.queue_seconds, action.epochs, strict=True):
            # A request that was preempted or has lost its worker is admitted again, but it came only once.
            if not epoch and self.lives[request.request_id].queue_seconds is None:
                self.lives[request.request_id].queue_seconds = seconds

    def record_tokens(self, worker: int, action: Emit) -> None:
        """A worker's requests have new tokens."""
        now, size = self._timeline.now, self._block_size
        for request_id, finish in zip(action.request_ids, action.finish, strict=True):
            life = self.lives[request_id]
            self._check(life, now)
            life.times.append(now)
            rows = len(life.request.prompt_token_ids) + len(life.times)
            if finish is not None:
                self._end(life)
            # The token's row begins a new block, as in the worker's block table.
            elif rows % size == 1 or size == 1:
                life.blocks += 1
                self._blocks[worker] += 1

    def _check(self, life: Life, now: float) -> None:
        if not life.times:
            self.missed_tokens += self.slo_ttft is not None and now - life.request.arrival > self.slo_ttft
        else:
            self.missed_tokens += self.slo_itl is not None and now - life.times[-1] > self.slo_itl

    def _end(self, life: Life) -> None:
        self.settle()
        self.in_flight -= 1
        life.has_ended = True
        self._requests[life.worker] -= 1
        self._blocks[life.worker] -= life.blocks
        if self._num_clients is not None:
            self._next_now()

    def _set_next(self) -> None:
        item = next(self._items, None)
        if item is not None:
            self._timeline.schedule(item.arrival, lambda: self._arrive(item))

    def _arrive(self, item: Item) -> None:
        self._submit(item)
        self._set_next()

    def _next_now(self) -> None:
        item = next(self._items, None)
        if item is not None:
            self._submit(item)

    def _submit(self, item: Item) -> None:
        self.settle()
        self.in_flight += 1
        prompt = _prompt(item.prompt)
        request = Request(len(self.lives), prompt, _params(item.answer), arrival=self._timeline.now)
        self.lives.append(Life(request, 0))
        self._send(self.lives[-1])

    def _send(self, life: Life) -> None:
        """Send a request to a worker, with the tokens that it has."""
        loads = {
            number: WorkerLoad(self._total_blocks, self._blocks[number], self._requests[number])
            for number in range(len(self._workers))
            if number not in self.lost_workers
        }
        answer = [TOKEN] * len(life.times)
        prompt = life.request.prompt_token_ids
        life.worker = self._dispatch(loads, [*prompt, *answer] if answer else prompt)
        life.blocks = -(-(len(prompt) + len(answer)) // self._block_size)
        self._requests[life.worker] += 1
        self._blocks[life.worker] += life.blocks
        self._workers[life.worker].send(Submit([life.request], [answer] if answer else []))

    def lose_worker(self, number: int) -> None:
        """A worker died. Its requests go on at others."""
        self.lost_workers.add(number)
        self._requests[number] = self._blocks[number] = 0
        for life in self.lives:
            if life.worker == number and not life.has_ended:
                self._send(life)

    def replace_worker(self, number: int, worker: SimulatedWorker) -> None:
        """A new process has this number."""
        self._workers[number] = worker
        self.lost_workers.discard(number)


@dataclass(frozen=True)
class WorkerReports:
    """What one worker reports to: see `executor.Reports`."""

    front: Front
    worker: int

    def on_admitted(self, action: Admit) -> None:
        """Pass on that requests have joined the worker's batch."""
        self.front.record_admissions(action)

    def on_tokens(self, action: Emit) -> None:
        """Pass on that the worker's requests have new tokens."""
        self.front.record_tokens(self.worker, action)
