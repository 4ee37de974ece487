"""What a round does, from its seed: a cluster's shape, faults, and requests. Pure.

The seed fixes what is done and after how many tokens; when the system runs which process is not in its hand.
Shapes are drawn so that every pair of settings meets in one of the clusters of a run (`cover`). Some rounds
in a row share a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from scripts.soak.shapes import PREFILL, SERVER, WORKER, Shape, cover

from moesaic import SamplingParams

KILL, FREEZE, RESIZE = "kill", "freeze", "resize"
"""RESIZE adds a process of a role, or removes the one that was added."""
KINDS = (
    *((KILL, SERVER), (KILL, WORKER), (KILL, PREFILL), (FREEZE, SERVER), (FREEZE, WORKER)),
    *((RESIZE, SERVER), (RESIZE, WORKER), (RESIZE, PREFILL)),
)
"""Without prefill workers, attention workers take their place. Faults of attention workers hit prefill
workers too, and the kill of a prefill worker happens during a transfer of KV."""
SEVERAL = "several kinds"
MOST_TOKENS = 72
"""Maximum number of tokens of one answer."""
SHARED = 4
"""Rounds that share a cluster."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process while it has work."""

    kind: str
    role: str
    after: int
    """Number of tokens since the fault before."""
    choice: float
    """Which of the processes that serve at that time, as a fraction from 0 to 1."""
    seconds: float
    """Seconds until a frozen process continues."""
    healed: bool
    """True: wait until the faults before are over. False: this fault may happen during them."""


@dataclass(frozen=True)
class Order:
    """A request of the pool, cut to a length and perhaps cancelled."""

    number: int
    max_tokens: int
    cancel_after: int | None
    """Number of tokens after which the request is cancelled. None: it is not."""


@dataclass(frozen=True)
class Plan:
    """What one round does."""

    seed: str
    shape: Shape
    faults: tuple[Fault, ...]
    requests: int
    """Minimum number of requests. More are sent while faults are left."""
    together: int
    """Number of requests in flight at once."""

    @property
    def kind(self) -> str:
        """The kind of the round's faults.

        Example: "kill, expert server".
        """
        kinds = {f"{fault.kind}, {fault.role}" for fault in self.faults}
        return kinds.pop() if len(kinds) == 1 else SEVERAL


@cache
def shapes(seed: str) -> tuple[Shape, ...]:
    """The clusters of a run, one after the other."""
    return tuple(cover(random.Random(f"{seed}/shapes")))


def plan_round(seed: str, number: int) -> Plan:
    """Round `number` of the run that `seed` names.

    Example: rounds 0 to 3 share a cluster.
    """
    name, known = f"{seed}/{number}", shapes(seed)
    rng, shape = random.Random(name), known[number // SHARED % len(known)]
    faults = tuple(_placed(fault, shape) for fault in _faults(rng))
    return Plan(name, shape, faults, requests=rng.randint(6, 10), together=rng.randint(2, 6))


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    """The faults of a round. In three rounds of five all are of one kind."""
    kind = rng.choice(KINDS) if rng.random() < 0.6 else None
    return tuple(_fault(rng, kind) for _ in range(rng.randint(2, 4)))


def _fault(rng: random.Random, kind: tuple[str, str] | None) -> Fault:
    what, role = kind or rng.choice(KINDS)
    return Fault(
        kind=what,
        role=role,
        after=rng.randint(1, 60),
        choice=rng.random(),
        seconds=rng.choice((0.05, 0.3, 0.8, 3.0)),
        healed=rng.random() < 0.6,
    )


def _placed(fault: Fault, shape: Shape) -> Fault:
    """The fault, of a role that the cluster has."""
    return replace(fault, role=WORKER) if fault.role == PREFILL and not shape.prefill_workers else fault


def orders(seed: str, pool: int) -> Iterator[Order]:
    """The requests of a round, without end. pool: the number of requests to draw from."""
    rng = random.Random(f"{seed}/orders")
    while True:
        length = rng.randint(4, MOST_TOKENS)
        cancel = rng.randrange(length) if rng.random() < 0.15 else None
        yield Order(rng.randrange(pool), length, cancel)


def pool(greedy: bool, vocabulary: int = 900, count: int = 32) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 3 to 190 tokens, some with a beginning in common, and how each is continued.

    vocabulary: tokens are below it.
    greedy: without samples, for kernels whose last bits depend on the batch: a near-tie shows, a sample at
    a boundary does not.
    """
    rng = random.Random(7)
    shared = [rng.randrange(3, vocabulary) for _ in range(48)]
    found = []
    for number in range(count):
        own = [rng.randrange(3, vocabulary) for _ in range(3 + rng.randrange(140))]
        params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
        if number % 2 and not greedy:
            params = replace(params, temperature=0.9, top_p=0.95, seed=number)
        if number % 5 == 3 and not greedy:
            params = replace(params, repetition_penalty=1.2, presence_penalty=0.3)
        found.append((shared + own if number % 3 == 0 else own, params))
    return found
