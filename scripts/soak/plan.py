"""What a round does, from its seed: a cluster's shape, faults, and requests. Pure.

The seed fixes what is done and after how many tokens; when the system runs which process is not in its hand.
Schedules, sizes and models follow each other in circles of 6, 7 and 5, so every 210 rounds in a row have all
combinations of the three; the rest is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moesaic import SamplingParams

SERVER, WORKER = "expert server", "attention worker"
PREFILL = "prefill worker"
"""Faults of attention workers hit these too."""
KILL, FREEZE = "kill", "freeze"
SCHEDULES = (
    ("barrier", 1, "defrag"),
    ("lockstep", 1, "defrag"),
    ("async", 1, "defrag"),
    ("lockstep", 2, "defrag"),
    ("async", 1, "mtfs"),
    ("async", 1, "flfs"),
)
"""(schedule, batches in flight, queue policy). Each round takes the next one."""
SIZES = ((1, 1, 1), (1, 2, 1), (2, 2, 2), (1, 3, 2), (2, 1, 1), (3, 2, 2), (2, 3, 1))
"""(attention workers, expert servers, minimum replicas)."""
MODELS = ("demo", "mixtral, k 2", "qwen3, k 8", "deepseek, k 6", "mixtral, k 1")
"""The demo (a Qwen3-MoE, k 4) and the models of `models.CHECKPOINTS`."""
TRANSPORTS = ("shm", "socket", "tcp")
KINDS = ((KILL, SERVER), (KILL, WORKER), (FREEZE, SERVER), (FREEZE, WORKER))
SEVERAL = "several kinds"
MOST_TOKENS = 72
"""Maximum number of tokens of one answer."""


@dataclass(frozen=True)
class Shape:
    """The settings of a cluster."""

    schedule: str
    inflight_batches: int
    queue_policy: str
    attention_workers: int
    expert_servers: int
    min_replicas: int
    model: str
    """One of MODELS."""
    redundant_experts: int
    """Copies of experts in each layer beyond the minimum."""
    combine: str
    transport: str
    """Transport between attention workers and expert servers: shm; socket, on one host; or tcp."""
    chunk: int
    """Maximum number of rows of a step."""
    kernels: str
    """auto: the native kernels of this machine; or reference."""
    bad_connections: bool
    """True: rows come late, twice or in another order, and connections break. See
    `tests.support.faulty_transport`."""
    ranks: int
    """Processes of each attention worker."""
    prefill_workers: int

    @property
    def exact(self) -> bool:
        """Whether answers are those of one process to the last bit."""
        alone = self.kernels == "auto" and self.combine == "exact"
        return alone and self.ranks == 1

    @property
    def name(self) -> str:
        """Example: "async mtfs, 2+3, min-replicas 1, qwen3, k 8, tcp, chunks of 16, native, exact"."""
        schedule = {"async": f"async {self.queue_policy}", "lockstep": f"lockstep {self.inflight_batches}"}
        workers = f"{self.attention_workers}x{self.ranks}" if self.ranks > 1 else str(self.attention_workers)
        workers += f"+{self.prefill_workers} prefill" if self.prefill_workers else ""
        size = f"{workers}+{self.expert_servers}, min-replicas {self.min_replicas}"
        kernels = "native" if self.kernels == "auto" else self.kernels
        parts = [schedule.get(self.schedule, self.schedule), size, self.model, self.transport]
        parts += [f"chunks of {self.chunk}", kernels, self.combine]
        parts += [f"{self.redundant_experts} redundant"] * (self.redundant_experts > 0)
        return ", ".join(parts + ["bad connections"] * self.bad_connections)


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


def plan_round(seed: str, number: int) -> Plan:
    """Round `number` of the run that `seed` names.

    Example: rounds 0 and 6 are both under the barrier schedule, with 1+1 and 2+3 processes.
    """
    name = f"{seed}/{number}"
    rng = random.Random(name)
    faults = _faults(rng)
    return Plan(
        name, _shape(rng, name, number), faults, requests=rng.randint(6, 10), together=rng.randint(2, 6)
    )


def _shape(rng: random.Random, name: str, number: int) -> Shape:
    schedule, batches, policy = SCHEDULES[number % len(SCHEDULES)]
    workers, servers, replicas = SIZES[number % len(SIZES)]
    processes = random.Random(f"{name}/processes")
    ranks, prefill = processes.choice((1, 1, 1, 2)), processes.choice((0, 0, 1, 2))
    return Shape(
        schedule=schedule,
        inflight_batches=batches,
        queue_policy=policy,
        attention_workers=workers,
        expert_servers=servers,
        min_replicas=replicas,
        model=MODELS[number % len(MODELS)],
        redundant_experts=rng.choice((0, 0, 3)) if servers > replicas == 1 else 0,
        combine="partial" if rng.random() < 0.2 else "exact",
        transport=rng.choice(TRANSPORTS),
        chunk=rng.choice((16, 64, 512)),
        kernels="reference" if rng.random() < 0.2 else "auto",
        bad_connections=rng.random() < 0.2,
        ranks=ranks,
        prefill_workers=prefill,
    )


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    """The faults of a round. In three rounds of five all are of one kind."""
    kind = rng.choice(KINDS) if rng.random() < 0.6 else None
    return tuple(_fault(rng, kind) for _ in range(rng.randint(2, 4)))


def _fault(rng: random.Random, kind: tuple[str, str] | None) -> Fault:
    what, role = kind or (KILL if rng.random() < 0.6 else FREEZE, SERVER if rng.random() < 0.65 else WORKER)
    return Fault(
        kind=what,
        role=role,
        after=rng.randint(1, 60),
        choice=rng.random(),
        seconds=rng.choice((0.05, 0.3, 0.8, 3.0)),
        healed=rng.random() < 0.6,
    )


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
