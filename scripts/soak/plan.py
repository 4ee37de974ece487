"""What a round does, from its seed: a cluster's shape, faults, and requests. Pure.

The seed fixes what is done and after how many tokens; when the system runs which process is not in its hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moesaic import SamplingParams

SERVER, WORKER = "expert server", "attention worker"
KILL, FREEZE = "kill", "freeze"
SCHEDULES = (
    ("barrier", 1, "defrag"),
    ("lockstep", 1, "defrag"),
    ("async", 1, "defrag"),
    ("lockstep", 2, "defrag"),
    ("async", 1, "mtfs"),
    ("async", 1, "flfs"),
)
"""Schedule, batches in flight, queue policy: round after round the next one."""
SIZES = ((1, 1, 1), (1, 2, 1), (2, 2, 2), (1, 3, 2), (2, 1, 1), (3, 2, 2), (2, 3, 1))
"""Attention workers, expert servers, least replicas. Seven, so that all of them meet all six schedules."""
MOST_TOKENS = 72
"""Of one answer."""


@dataclass(frozen=True)
class Shape:
    """A cluster."""

    schedule: str
    inflight_batches: int
    queue_policy: str
    attention_workers: int
    expert_servers: int
    min_replicas: int
    transport: str
    """shm, or stream: TCP sockets between attention workers and expert servers."""
    chunk: int
    """Most rows of a step."""
    kernels: str
    """auto: the native ones of this machine; or reference."""

    @property
    def name(self) -> str:
        """Example: "async mtfs, 2+3, min-replicas 1, shm, chunks of 16, native"."""
        schedule = {"async": f"async {self.queue_policy}", "lockstep": f"lockstep {self.inflight_batches}"}
        size = f"{self.attention_workers}+{self.expert_servers}, min-replicas {self.min_replicas}"
        kernels = "native" if self.kernels == "auto" else self.kernels
        how = schedule.get(self.schedule, self.schedule)
        return f"{how}, {size}, {self.transport}, chunks of {self.chunk}, {kernels}"


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process while it has work."""

    kind: str
    role: str
    after: int
    """Tokens since the fault before."""
    choice: float
    """Which of the processes that serve then, 0 to 1."""
    seconds: float
    """Until a frozen process goes on."""
    healed: bool
    """Wait until the faults before are over; else it may come on top of them."""


@dataclass(frozen=True)
class Order:
    """A request of the pool, cut to a length and perhaps cancelled."""

    number: int
    max_tokens: int
    cancel_after: int | None
    """Tokens."""


@dataclass(frozen=True)
class Plan:
    """One round."""

    seed: str
    shape: Shape
    faults: tuple[Fault, ...]
    requests: int
    """At least so many are sent; more while faults are left."""
    together: int
    """Under way at once."""


def plan_round(seed: str, number: int) -> Plan:
    """Round `number` of the run that `seed` names.

    Example: rounds 0 and 6 are both under the barrier schedule, with 1+1 and 2+3 processes.
    """
    name = f"{seed}/{number}"
    rng = random.Random(name)
    schedule, batches, policy = SCHEDULES[number % len(SCHEDULES)]
    workers, servers, replicas = SIZES[number % len(SIZES)]
    shape = Shape(
        schedule=schedule,
        inflight_batches=batches,
        queue_policy=policy,
        attention_workers=workers,
        expert_servers=servers,
        min_replicas=replicas,
        transport="stream" if rng.random() < 0.25 else "shm",
        chunk=rng.choice((16, 64, 512)),
        kernels="reference" if rng.random() < 0.2 else "auto",
    )
    faults = tuple(_fault(rng) for _ in range(rng.randint(2, 4)))
    return Plan(name, shape, faults, requests=rng.randint(6, 10), together=rng.randint(2, 6))


def _fault(rng: random.Random) -> Fault:
    return Fault(
        kind=KILL if rng.random() < 0.6 else FREEZE,
        role=SERVER if rng.random() < 0.65 else WORKER,
        after=rng.randint(1, 60),
        choice=rng.random(),
        seconds=rng.choice((0.05, 0.3, 0.8, 3.0)),
        healed=rng.random() < 0.6,
    )


def orders(seed: str, pool: int) -> Iterator[Order]:
    """Requests of a round without end. pool: how many there are to draw from."""
    rng = random.Random(f"{seed}/orders")
    while True:
        length = rng.randint(4, MOST_TOKENS)
        cancel = rng.randrange(length) if rng.random() < 0.15 else None
        yield Order(rng.randrange(pool), length, cancel)


def pool(greedy: bool, count: int = 32) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 3 to 190 tokens, some with a beginning in common, and how each is continued.

    greedy: without samples, for kernels whose last bits depend on the batch: a near-tie shows, a sample at
    a boundary does not.
    """
    rng = random.Random(7)
    shared = [rng.randrange(3, 900) for _ in range(48)]
    found = []
    for number in range(count):
        own = [rng.randrange(3, 900) for _ in range(3 + rng.randrange(140))]
        params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
        if number % 2 and not greedy:
            params = replace(params, temperature=0.9, top_p=0.95, seed=number)
        if number % 5 == 3 and not greedy:
            params = replace(params, repetition_penalty=1.2, presence_penalty=0.3)
        found.append((shared + own if number % 3 == 0 else own, params))
    return found
