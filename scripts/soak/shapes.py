"""The clusters of a run: every pair of settings meets in one of them. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

SERVER, WORKER, PREFILL = "expert server", "attention worker", "prefill worker"
SCHEDULES = (
    ("barrier", 1, "defrag"),
    ("lockstep", 1, "defrag"),
    ("async", 1, "defrag"),
    ("lockstep", 2, "defrag"),
    ("async", 1, "mtfs"),
    ("async", 1, "flfs"),
)
"""(schedule, batches in flight, queue policy)."""
SIZES = ((1, 1, 1), (1, 2, 1), (2, 2, 2), (1, 3, 2), (2, 1, 1), (3, 2, 2), (2, 3, 1))
"""(attention workers, expert servers, minimum replicas)."""
MODELS = ("demo", "mixtral, k 2", "qwen3, k 8", "deepseek, k 6", "mixtral, k 1", "states")
"""The demo (a Qwen3-MoE, k 4) and the models of `models.CHECKPOINTS`. The last one has linear attention."""
TRANSPORTS = ("shm", "socket", "tcp")
FACTORS: dict[str, tuple[object, ...]] = {
    "schedule": SCHEDULES,
    "size": SIZES,
    "model": MODELS,
    "transport": TRANSPORTS,
    "chunk": (16, 64, 512),
    "kernels": ("auto", "auto", "auto", "auto", "reference"),
    "combine": ("exact", "exact", "exact", "exact", "partial"),
    "bad_connections": (False, False, False, False, True),
    "redundant_experts": (0, 0, 3),
    "ranks": (1, 1, 2),
    "prefill_workers": (0, 1, 2),
    "small_memory": (False, False, True),
    "drafts": (False, False, True),
    "autoscale": (False, False, True),
}
"""Choices of each setting; one that stands here more often is drawn more often."""
CANDIDATES = 40
"""Clusters among which the next one is chosen."""

Choices = tuple[object, ...]
"""One choice of each factor."""
Met = frozenset[tuple[str, object]]
"""Choices of two settings."""


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
    transport: str
    """Transport between attention workers and expert servers: shm; socket, on one host; or tcp."""
    chunk: int
    """Maximum number of rows of a step."""
    kernels: str
    """auto: the native kernels of this machine; or reference."""
    combine: str
    bad_connections: bool
    """True: rows come late, twice or in another order, and connections break. See
    `tests.support.faulty_transport`."""
    redundant_experts: int
    """Copies of experts in each layer beyond the minimum."""
    ranks: int
    """Processes of each worker."""
    prefill_workers: int
    small_memory: bool
    """True: servers hold more experts than their --fast-memory."""
    drafts: bool
    """True: tokens are drafted by n-grams."""
    autoscale: bool
    """True: each role has its number of processes or one more, by its load."""

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
        flags = ("small memory", "drafts", "autoscale", "bad connections")
        return ", ".join(parts + [flag for flag in flags if getattr(self, flag.replace(" ", "_"))])


def made(choices: Choices) -> Shape:
    """The shape of a choice of each factor."""
    schedule, size, *others = choices
    assert isinstance(schedule, tuple) and isinstance(size, tuple)
    return Shape(*schedule, *size, *others)  # type: ignore[arg-type]


def allowed(choices: Choices) -> bool:
    """Whether the settings go together.

    A further copy of an expert needs a server without it, and the experts of a small memory native kernels.
    """
    shape = made(choices)
    spare = shape.expert_servers > shape.min_replicas == 1 or not shape.redundant_experts
    return spare and (shape.kernels == "auto" or not shape.small_memory)


def pairs_of(choices: Choices) -> set[Met]:
    """Every pair of its choices."""
    return {frozenset(pair) for pair in combinations(zip(FACTORS, choices, strict=True), 2)}


def cover(rng: random.Random) -> Iterator[Shape]:
    """Shapes until every pair of choices that goes together has met in one of them.

    Each has a pair that had not met, and of CANDIDATES such shapes the most of them.
    """
    left = dict.fromkeys(_every_pair(rng))
    while left:
        found = [one for _ in range(CANDIDATES) if (one := _drawn(rng, next(iter(left)))) is not None]
        if not found:  # the two do not go together
            left.pop(next(iter(left)))
            continue
        best = max(found, key=lambda one: sum(pair in left for pair in pairs_of(one)))
        for pair in pairs_of(best):
            left.pop(pair, None)
        yield made(best)


def _every_pair(rng: random.Random) -> list[Met]:
    """Every pair of choices of two factors, in an order that is drawn."""
    found = [
        frozenset({(one, a), (other, b)})
        for one, other in combinations(FACTORS, 2)
        for a, b in product(dict.fromkeys(FACTORS[one]), dict.fromkeys(FACTORS[other]))
    ]
    rng.shuffle(found)
    return found


def _drawn(rng: random.Random, pair: Met) -> Choices | None:
    """A choice of each factor, with these two. None if what was drawn does not go together."""
    fixed = dict(pair)
    drawn = tuple(fixed.get(name, rng.choice(values)) for name, values in FACTORS.items())
    return drawn if allowed(drawn) else None
