"""The scheduler of an expert server: which waiting (row, expert) pairs run next as one batch.

It identifies calls by number and knows nothing of requests. The pairs of a call wait in queues. There is one
queue per layer (`groups` 1), or one per (layer, expert) (`groups` is then the number of experts). A run takes
a whole queue with the pairs of all clients, so that each active expert's weights are read once. With queues
for experts it takes one of them, or all of a layer where separate runs would cost too much. A start rule
decides when enough pairs wait to begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.microqueue import QueuePolicy

SMOOTHING = 0.1
"""Weight of the newest value in an exponential moving average."""

DECISION_RUNS = 32
"""Runs for which a server keeps waiting for its clients, or not."""
RECENT_CALLS = 32
"""Calls of which the shortest time away counts."""
ROUND_DECAY = 1 / 64
"""Share by which the time of a round falls with each run without some client."""

AloneRule = Callable[[Sequence[int], float], bool]
"""Whether one queue of a layer runs alone. It is given the pairs of each queue of the layer, and the share of
the time that the server computed lately."""


def run_every_queue_alone(pairs: Sequence[int], busy: float) -> bool:
    """The rule of the paper: each queue runs alone."""
    return True


@dataclass(frozen=True)
class Run:
    """Compute these pairs of one layer, and write each part straight into its call's answer."""

    layer: int
    parts: list[tuple[int, IntArray]]
    """[(call, its pairs), ...] in order of arrival."""


@dataclass(frozen=True)
class Waiting:
    """What a start rule knows before a run."""

    pairs: int
    """Pairs that wait in all queues."""
    mean_call: float
    """Moving average of the pairs of a call."""
    clients: int
    """Number of clients that a start waits for."""
    waiting_clients: int
    """Number of clients with a call that waits."""
    away_seconds: float = 0.0
    """Seconds from an answer to the next call of the same client, if all clients are answered together."""
    in_step: bool = False
    """Whether the last runs had calls of all clients."""
    runs: int = 0
    """Runs so far."""
    calls: Sequence[float] = ()
    """Moving averages of the pairs of a call, by layer; 0 where no call came. Later calls change them."""


class StartRule(Protocol):
    """Decides when a run may begin."""

    def ready(self, waiting: Waiting) -> bool:
        """Whether a run may begin now."""
        ...

    def patience(self, took: float) -> float:
        """Seconds that the oldest pair waits at most. took: recent mean seconds of a run."""
        ...


@dataclass(frozen=True)
class EnoughPairs:
    """Expert-as-a-Service, section 3: begin when enough pairs wait or the oldest has waited long enough.

    The text of the paper waits for all clients, and its figure 5 for a sufficient number. Here both are
    numbers. A client that waits for its answer sends nothing more. So a run begins at the latest when every
    client has a call that waits.
    """

    pairs: int = 1
    """Number of pairs that is enough."""
    wait: float = 0.0
    """Seconds after which the oldest pair runs with the pairs that there are."""

    def ready(self, waiting: Waiting) -> bool:
        return waiting.pairs >= self.pairs or waiting.waiting_clients >= waiting.clients

    def patience(self, took: float) -> float:
        return self.wait


@dataclass(frozen=True)
class WaitForSmallCalls:
    """Let clients wait for each other while their calls are too small to read weights for. Our own rule.

    A run for two small calls takes little longer than for one. Clients that were answered together also ask
    together the next time. Larger calls run as they come, so that one client's rows are computed while
    another's are being sent.
    """

    pairs: int
    """Pairs from which a call gets a run of its own."""
    wait: float
    """Maximum seconds of waiting."""
    runs: float
    """Maximum waiting, in mean run times. It bounds the loss when a client does not call again."""

    def ready(self, waiting: Waiting) -> bool:
        return waiting.mean_call >= self.pairs or waiting.waiting_clients >= waiting.clients

    def patience(self, took: float) -> float:
        return min(self.wait, self.runs * took)


@dataclass
class WaitByCurves:
    """Let clients wait for each other while a run for all of them pays, by the device's curve and the load.

    Clients that are out of step need some runs until they call together. So what was decided holds for a
    while.
    """

    should_wait: Callable[[Waiting], bool]
    wait: float
    """Maximum seconds of waiting."""
    runs: float
    """Maximum waiting, in mean run times."""
    fallback_rule: StartRule
    """The rule while it does not pay."""
    _waits: bool = False
    _next_decision_run: int = 0
    """Number of runs up to which `_waits` holds."""

    def ready(self, waiting: Waiting) -> bool:
        if waiting.runs >= self._next_decision_run:
            self._waits, self._next_decision_run = self.should_wait(waiting), waiting.runs + DECISION_RUNS
        if self._waits:
            return waiting.waiting_clients >= waiting.clients
        return self.fallback_rule.ready(waiting)

    def patience(self, took: float) -> float:
        return min(self.wait, self.runs * took) if self._waits else self.fallback_rule.patience(took)


@dataclass
class _Queue:
    waiting_since: float
    parts: list[tuple[int, IntArray]] = field(default_factory=list)

    @property
    def pairs(self) -> int:
        """Pairs that wait in this queue. A call without pairs counts as one."""
        return sum(max(1, len(pairs)) for _, pairs in self.parts)


class ExpertServerScheduler:
    """Chooses the runs of an expert server. It is deterministic."""

    def __init__(
        self,
        layers: Sequence[int],
        policy: QueuePolicy,
        rule: StartRule,
        groups: int = 1,
        runs_alone: AloneRule = run_every_queue_alone,
    ) -> None:
        """groups: queues of a layer, 1 or the number of experts. runs_alone: whether one runs alone."""
        self._runs_alone, self._policy, self._rule = runs_alone, policy, rule
        self._layers = tuple(layers)
        self._index = {layer: index for index, layer in enumerate(self._layers)}
        self._shape = len(self._layers), groups
        self._queues: dict[tuple[int, int], _Queue] = {}
        """The queues that are not empty, by (index of the layer, group)."""
        self._client: dict[int, int] = {}
        """The client of each call that still has waiting pairs."""
        self._waiting: dict[int, int] = {}
        """Number of waiting calls of each client."""
        self._clients: set[int] = set()
        self._left: dict[int, int] = {}
        """Number of waiting pairs of each call."""
        self.waiting_pairs = 0
        """Pairs in all queues."""
        self._mean_run = 0.0
        """Moving average of the seconds of a run."""
        self._mean_call = 0.0
        """Moving average of the pairs of a call."""
        self._calls = [0.0] * len(self._layers)
        """The same of each layer."""
        self._served_now: list[int] = []
        """Clients whose calls ended with the last run, until that run is over."""
        self._answer_times: dict[int, float] = {}
        """When each client that has not called since then was answered."""
        self._away_seconds: deque[float] = deque(maxlen=RECENT_CALLS)
        """Seconds from an answer to the next call of the same client, of the last calls."""
        self._runs = 0
        """Runs so far."""
        self._rounds = 0
        """Runs one after another that had calls of all clients."""
        self._round = 0.0
        """Moving average of the seconds between two such runs. It falls with other runs."""
        self._busy = 0.0
        """Moving average of the share of the time from a run's begin to the next one that it took."""
        self._run_took = 0.0
        """Seconds of the last run."""
        self._last_began: float | None = None
        """When the last run began. Kept after its end, to measure the share of busy time."""
        self._run_began: float | None = None
        """When the last run began. None once the server has asked for the next run."""

    def client_joined(self, client: int) -> None:
        """Let starts wait for this client, until one had to begin without it.

        A repeated call changes nothing.
        """
        self._clients.add(client)

    def client_paused(self, client: int) -> None:
        """Let starts not wait for this client until it joins again."""
        self._clients.discard(client)

    def client_left(self, client: int) -> None:
        """Forget the client and drop its calls."""
        self._clients.discard(client)
        self._waiting.pop(client, None)
        self._answer_times.pop(client, None)
        dropped_calls = {call for call, owner in self._client.items() if owner == client}
        for key in list(self._queues):
            queue = self._queues[key]
            queue.parts = [(call, pairs) for call, pairs in queue.parts if call not in dropped_calls]
            if not queue.parts:
                del self._queues[key]
        self.waiting_pairs = sum(queue.pairs for queue in self._queues.values())
        for call in dropped_calls:
            del self._client[call], self._left[call]

    def add_call(
        self, call: int, client: int, layer: int, experts: npt.NDArray[np.integer], now: float
    ) -> None:
        """Queue a call of `client` for the pairs through `experts` [p] of `layer`.

        A call number is never used twice.
        """
        index = self._index[layer]
        self._mean_call, layer_mean = _mean(self._mean_call, len(experts)), self._calls[index]
        self._calls[index] = _mean(layer_mean, len(experts)) if layer_mean else float(len(experts))
        if client in self._answer_times:
            self._away_seconds.append(now - self._answer_times.pop(client))
        self._client[call], self._left[call] = client, len(experts)
        self._waiting[client] = self._waiting.get(client, 0) + 1
        for group, pairs in self._split(experts):
            queue = self._queues.setdefault((index, group), _Queue(now))
            queue.parts.append((call, pairs))
            self.waiting_pairs += max(1, len(pairs))

    def next_run(self, now: float) -> Run | None:
        """The run to compute now. None when nothing waits, or not enough yet (see `wait`)."""
        if self._run_began is not None:
            self._run_took = now - self._run_began
            self._mean_run += SMOOTHING * (self._run_took - self._mean_run)
            self._run_began = None
            self._answer_times.update((client, now) for client in self._served_now)
        if not self._queues:
            return None
        clients, waiting = len(self._clients), len(self._waiting)
        away_seconds = max(
            min(self._away_seconds, default=0.0), self._round
        )  # longer ones were at other servers, too
        in_step = self._rounds > 1
        state = Waiting(
            self.waiting_pairs,
            self._mean_call,
            clients,
            waiting,
            away_seconds,
            in_step,
            self._runs,
            self._calls,
        )
        if not self._rule.ready(state):
            if self._oldest(now) < self._rule.patience(self._mean_run):
                return None
            # A client that did not call in time is not waited for again at each of the following layers.
            self._clients.intersection_update(self._waiting)
        key, self._served_now = self._choice(now), []
        queues = self._take_queues(key)
        self._count_clients(queues, now)
        for queue in queues:
            self.waiting_pairs -= queue.pairs
            for call, pairs in queue.parts:
                self._finish_pairs(call, len(pairs))
        if self._last_began is not None and now > self._last_began:
            self._busy += SMOOTHING * (self._run_took / (now - self._last_began) - self._busy)
        self._run_began = self._last_began = now
        self._runs += 1
        return Run(self._layers[key[0]], queues[0].parts if len(queues) == 1 else _join_queues(queues))

    def _count_clients(self, queues: list[_Queue], now: float) -> None:
        """Measure how clients call, at the begin of a run of these queues."""
        calling_clients = {self._client[call] for queue in queues for call, _ in queue.parts}
        if not len(calling_clients) >= len(self._clients) > 1:
            self._rounds, self._round = 0, self._round * (1 - ROUND_DECAY)
            return
        self._rounds += 1
        if self._rounds > 1 and self._last_began is not None:
            round_seconds = now - self._last_began - self._run_took
            self._round = _mean(self._round, round_seconds) if self._round else round_seconds

    def _take_queues(self, queue_key: tuple[int, int]) -> list[_Queue]:
        """Removes the chosen queue, and the others of its layer where it does not run alone."""
        keys = [queue_key]
        if self._shape[1] > 1:
            layer_keys = [key for key in self._queues if key[0] == queue_key[0]]
            if len(layer_keys) > 1 and not self._runs_alone(
                [self._queues[key].pairs for key in layer_keys], self._busy
            ):
                keys = layer_keys
        return [self._queues.pop(key) for key in keys]

    def _choice(self, now: float) -> tuple[int, int]:
        if len(self._queues) == 1 and not self._policy.remembers:  # the usual case, and caches are cold
            return next(iter(self._queues))
        tokens, wait_seconds = np.zeros(self._shape, dtype=np.int64), np.zeros(self._shape)
        for key, queue in self._queues.items():
            tokens[key], wait_seconds[key] = queue.pairs, now - queue.waiting_since
        queue_key = self._policy.choose(tokens, wait_seconds)
        assert queue_key is not None, "no queue is empty"
        return queue_key

    def wait(self, now: float) -> float | None:
        """Seconds until a run may begin if nothing else arrives. None when nothing waits."""
        if not self._queues:
            return None
        return max(0.0, self._rule.patience(self._mean_run) - self._oldest(now))

    def _oldest(self, now: float) -> float:
        """Seconds that the oldest pair has waited."""
        return max(now - queue.waiting_since for queue in self._queues.values())

    def _finish_pairs(self, call: int, pairs: int) -> None:
        self._left[call] -= pairs
        if self._left[call]:
            return
        client = self._client.pop(call)
        self._served_now.append(client)
        del self._left[call]
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]

    def _split(self, experts: npt.NDArray[np.integer]) -> list[tuple[int, IntArray]]:
        """[(group, its pairs), ...]. The pairs of a group keep their order."""
        if self._shape[1] == 1 or not len(experts):
            return [(0, _all_pairs(len(experts)))]
        order = np.argsort(experts, kind="stable")
        groups, starts = np.unique(experts[order], return_index=True)
        return list(zip(groups.tolist(), np.split(order, starts[1:]), strict=True))


def _mean(mean: float, newest: float) -> float:
    return mean + SMOOTHING * (newest - mean)


def _join_queues(queues: list[_Queue]) -> list[tuple[int, IntArray]]:
    """The parts of several queues, with one part of each call. Calls are in order of their numbers."""
    parts_by_call: dict[int, list[IntArray]] = {}
    for queue in queues:
        for call, pairs in queue.parts:
            parts_by_call.setdefault(call, []).append(pairs)
    return [(call, np.sort(np.concatenate(parts_by_call[call]))) for call in sorted(parts_by_call)]


@lru_cache(maxsize=64)
def _all_pairs(pairs: int) -> IntArray:
    """[p] the indices of all pairs. The array is cached and read-only."""
    indices = np.arange(pairs)
    indices.flags.writeable = False
    return indices
