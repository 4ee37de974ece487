"""The scheduler of an expert server: which waiting pairs run next, together, whoever sent them.

It knows calls by number and nothing of requests. A call's pairs wait in queues, one per layer (`groups` 1) or
one per (layer, expert) (`groups` the number of experts); a run takes one queue whole, from every client, so
that each active expert's weights are read once. A start rule says when enough is there to begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.microqueue import QueuePolicy

RECENT = 0.1
"""What the last one counts in a mean."""


@dataclass(frozen=True)
class Run:
    """Compute these pairs of one layer, each part straight into its call's answer."""

    layer: int
    parts: list[tuple[int, IntArray]]
    """(call, its pairs), in order of arrival."""


@dataclass(frozen=True)
class Waiting:
    """What a server sees before a run."""

    pairs: int
    """That wait in all."""
    usual: float
    """Pairs of a call, lately."""
    clients: int
    """There are."""
    asking: int
    """Of these, with a call that waits."""


class StartRule(Protocol):
    """When the queues may be served."""

    def ready(self, waiting: Waiting) -> bool: ...

    def patience(self, took: float) -> float:
        """Seconds that the oldest pair waits at most. took: what a run took lately."""
        ...


@dataclass(frozen=True)
class Enough:
    """Expert-as-a-Service, section 3: begin when enough is ready or the oldest waited long enough.

    The paper's text waits for all clients and its figure 5 for a sufficient number; both are numbers here.
    Nothing is gained by waiting for a client that is waiting itself, so a start never waits for more than
    every client to have a call in.
    """

    pairs: int = 1
    """Pairs that are enough."""
    wait: float = 0.0
    """Seconds after which the oldest pair runs with whatever there is."""

    def ready(self, waiting: Waiting) -> bool:
        return waiting.pairs >= self.pairs or waiting.asking >= waiting.clients

    def patience(self, took: float) -> float:
        return self.wait


@dataclass(frozen=True)
class WhileSmall:
    """Ours: clients wait for each other as long as their calls are too small to read weights for.

    Then a run for two takes little longer than for one, and clients that once got their answers together ask
    together again. Larger calls are served as they come: one client's rows are computed while another's are
    on their way.
    """

    pairs: int
    """Of a call that is worth a run of its own."""
    wait: float
    """Seconds at most."""
    runs: float
    """What so many runs take, at most: a client that went elsewhere costs little then."""

    def ready(self, waiting: Waiting) -> bool:
        return waiting.usual >= self.pairs or waiting.asking >= waiting.clients

    def patience(self, took: float) -> float:
        return min(self.wait, self.runs * took)


@dataclass
class _Queue:
    since: float
    parts: list[tuple[int, IntArray]] = field(default_factory=list)

    @property
    def pairs(self) -> int:
        """That wait here, of which an empty call counts one."""
        return sum(max(1, len(pairs)) for _, pairs in self.parts)


class ExpertServerScheduler:
    """Pure: the same calls at the same times give the same runs."""

    def __init__(self, layers: Sequence[int], policy: QueuePolicy, rule: StartRule, groups: int = 1) -> None:
        self._layers = tuple(layers)
        self._line = {layer: line for line, layer in enumerate(self._layers)}
        self._policy = policy
        self._rule = rule
        self._shape = len(self._layers), groups
        self._queues: dict[tuple[int, int], _Queue] = {}
        """Those that are not empty, by line and group."""
        self._client: dict[int, int] = {}
        """Call -> its client, while any of its pairs waits."""
        self._waiting: dict[int, int] = {}
        """Client -> its calls that wait."""
        self._clients: set[int] = set()
        self._left: dict[int, int] = {}
        self.waiting_pairs = 0
        """In all queues."""
        self._took = 0.0
        """Seconds of a run, the last ones more."""
        self._usual = 0.0
        """Pairs of a call, the last ones more."""
        self._began: float | None = None
        """When the last one did, until the server asks for the next."""

    def client_joined(self, client: int) -> None:
        """Starts wait for it, until one had to begin without it. Again: nothing."""
        self._clients.add(client)

    def client_paused(self, client: int) -> None:
        """Starts do not wait for it until it joins again."""
        self._clients.discard(client)

    def client_left(self, client: int) -> None:
        """Forget the client and what it asked for: nobody waits for it."""
        self._clients.discard(client)
        self._waiting.pop(client, None)
        gone = {call for call, owner in self._client.items() if owner == client}
        for key in list(self._queues):
            queue = self._queues[key]
            queue.parts = [(call, pairs) for call, pairs in queue.parts if call not in gone]
            if not queue.parts:
                del self._queues[key]
        self.waiting_pairs = sum(queue.pairs for queue in self._queues.values())
        for call in gone:
            del self._client[call], self._left[call]

    def arrived(
        self, call: int, client: int, layer: int, experts: npt.NDArray[np.integer], now: float
    ) -> None:
        """A call of `client` for pairs through `experts` [p] of `layer`. Calls are never numbered twice."""
        line = self._line[layer]
        self._usual += RECENT * (len(experts) - self._usual)
        self._client[call], self._left[call] = client, len(experts)
        self._waiting[client] = self._waiting.get(client, 0) + 1
        for group, pairs in self._split(experts):
            queue = self._queues.setdefault((line, group), _Queue(now))
            queue.parts.append((call, pairs))
            self.waiting_pairs += max(1, len(pairs))

    def next_run(self, now: float) -> Run | None:
        """What to compute now; None: nothing is there, or not enough yet (see `wait`)."""
        if self._began is not None:
            self._took += RECENT * (now - self._began - self._took)
            self._began = None
        if not self._queues:
            return None
        if not self._rule.ready(
            Waiting(self.waiting_pairs, self._usual, len(self._clients), len(self._waiting))
        ):
            if self._oldest(now) < self._rule.patience(self._took):
                return None
            self._clients.intersection_update(self._waiting)  # it waited in vain: not again at each layer
        chosen = self._choice(now)
        queue = self._queues.pop(chosen)
        self.waiting_pairs -= queue.pairs
        for call, mine in queue.parts:
            self._served(call, len(mine))
        self._began = now
        return Run(self._layers[chosen[0]], queue.parts)

    def _choice(self, now: float) -> tuple[int, int]:
        if len(self._queues) == 1 and not self._policy.remembers:  # mostly so, and caches are cold
            return next(iter(self._queues))
        tokens, waited = np.zeros(self._shape, dtype=np.int64), np.zeros(self._shape)
        for key, queue in self._queues.items():
            tokens[key], waited[key] = queue.pairs, now - queue.since
        chosen = self._policy.choose(tokens, waited)
        assert chosen is not None  # no queue is empty
        return chosen

    def wait(self, now: float) -> float | None:
        """Seconds until a run may begin though nothing arrives; None: never."""
        if not self._queues:
            return None
        return max(0.0, self._rule.patience(self._took) - self._oldest(now))

    def _oldest(self, now: float) -> float:
        """Seconds that the oldest pair has waited."""
        return max(now - queue.since for queue in self._queues.values())

    def _served(self, call: int, pairs: int) -> None:
        self._left[call] -= pairs
        if self._left[call]:
            return
        client = self._client.pop(call)
        del self._left[call]
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]

    def _split(self, experts: npt.NDArray[np.integer]) -> list[tuple[int, IntArray]]:
        """Pairs by group, in their order."""
        if self._shape[1] == 1 or not len(experts):
            return [(0, _every(len(experts)))]
        order = np.argsort(experts, kind="stable")
        groups, starts = np.unique(experts[order], return_index=True)
        return list(zip(groups.tolist(), np.split(order, starts[1:]), strict=True))


@lru_cache(maxsize=64)
def _every(pairs: int) -> IntArray:
    """[p] all of them. Kept: not to be written."""
    found = np.arange(pairs)
    found.flags.writeable = False
    return found
