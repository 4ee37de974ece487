"""Which processes run on which devices, and whether a model fits there.

FORMS lists the forms of a deployment. Each yields layouts. A form with other devices for prefill than for
decode would be one more function, with what it needs in `Layout`, once the simulation has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from moesaic.core.paced_devices import LinkModel
from moesaic.cost.ranks import model_of_rank
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.deployment.spec import ClusterSpec, Pool

MOST_SMALL = 16
"""Numbers of devices up to which every number of processes is tried. Beyond it, only some are."""


@dataclass(frozen=True)
class Layout:
    """How many processes run, on the devices of one kind."""

    pool: Pool
    workers: int
    ranks: int
    """Devices of each worker (tensor parallelism)."""
    servers: int
    beside: bool = False
    """Whether server i shares the device of worker i (data and expert parallelism)."""
    spread: int = 1
    """Hosts that have attention workers, each of them as many. 1: the first host has all workers."""
    copied: bool = False
    """Whether the servers of each host have all experts, so that no row leaves its host."""

    @property
    def attention_devices(self) -> int:
        return self.workers * self.ranks

    @property
    def devices(self) -> int:
        """Devices that are used."""
        return self.attention_devices + (0 if self.beside else self.servers)

    @property
    def workers_here(self) -> int:
        """Attention workers on the first host."""
        return self.workers // self.spread

    @property
    def servers_here(self) -> int:
        """Expert servers on the first host."""
        if self.beside or self.spread > 1:
            return self.servers // self.spread
        return min(self.servers, self.pool.per_host - self.attention_devices)

    @property
    def hosts(self) -> int:
        """Hosts that are used."""
        if self.spread > 1:
            return self.spread
        return 1 + -(-(self.servers - self.servers_here) // self.pool.per_host)

    @property
    def price_per_hour(self) -> float | None:
        """Price of the hosts that are used. None if they have no price."""
        return None if self.pool.price_per_hour is None else self.hosts * self.pool.price_per_hour

    def link(self, between: LinkModel) -> LinkModel:
        """The link between workers and servers. If rows leave hosts, all of it is the one between hosts."""
        return self.pool.inside if self.hosts == 1 or self.copied else between

    @property
    def one_of_copies(self) -> Layout:
        """What one host has, where all hosts have all experts."""
        if not self.copied:
            return self
        own = self.workers_here, self.ranks, self.servers_here
        return Layout(self.pool, *own)

    def describe(self) -> str:
        """The processes in words."""
        if self.beside:
            return f"{self.workers} x (attention and experts)"
        ranks = f" of {self.ranks} ranks" if self.ranks > 1 else ""
        if self.spread == 1:
            return f"{self.workers} attention{ranks} + {self.servers} experts"
        each = f"({self.workers_here} attention{ranks} + {self.servers_here} experts)"
        return f"{self.spread} hosts x {each}{', all experts on each' if self.copied else ''}"


def apart(pool: Pool, model: ModelSizes) -> Iterator[Layout]:
    """Attention workers on the first host, and expert servers on other devices of any host.

    The first host has a server too, since `serve` begins with one.
    """
    for ranks in _ranks(pool, model):
        for workers in _numbers((pool.per_host - 1) // ranks):
            for servers in _numbers(min(pool.devices - workers * ranks, model.experts)):
                yield Layout(pool, workers, ranks, servers)


def beside(pool: Pool, model: ModelSizes) -> Iterator[Layout]:
    """Ranks of one host, each with the attention of its requests and a part of the experts."""
    for ranks in _numbers(min(pool.per_host, model.experts)):
        yield Layout(pool, ranks, 1, ranks, beside=True)


def spread(pool: Pool, model: ModelSizes) -> Iterator[Layout]:
    """Several whole hosts, each with as many attention workers and expert servers as the others.

    The experts are divided among all servers, or each host has all of them.
    """
    for hosts in sorted({pool.hosts, *(count for count in (2, 4, 8, 16) if count < pool.hosts)} - {1}):
        for ranks in _ranks(pool, model):
            for workers in _numbers((pool.per_host - 1) // ranks):
                servers = pool.per_host - workers * ranks
                if servers * hosts <= model.experts:
                    yield Layout(pool, workers * hosts, ranks, servers * hosts, spread=hosts)
                if hosts <= servers <= model.experts:  # serve begins with a server for each copy
                    yield Layout(pool, workers * hosts, ranks, servers * hosts, spread=hosts, copied=True)


FORMS: tuple[Callable[[Pool, ModelSizes], Iterator[Layout]], ...] = (apart, beside, spread)


def every(spec: ClusterSpec, model: ModelSizes) -> Iterator[Layout]:
    """All layouts of all forms."""
    for pool in spec.pools:
        for form in FORMS:
            yield from form(pool, model)


def _ranks(pool: Pool, model: ModelSizes) -> list[int]:
    """Possible numbers of ranks of a worker. Measured curves are those of one device."""
    heads = getattr(model.attention, "heads", None)
    if pool.curves is not None or not isinstance(heads, int):
        return [1]
    return [ranks for ranks in (1, 2, 4, 8) if ranks <= pool.per_host and heads % ranks == 0]


def _numbers(most: int) -> list[int]:
    """Numbers of processes that are tried: all up to MOST_SMALL, then steps of an eighth."""
    found = list(range(1, min(most, MOST_SMALL) + 1))
    while found and found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // 8)))
    return found


def attention_model(model: ModelSizes, ranks: int) -> ModelSizes:
    """The sizes of one rank of an attention worker."""
    return model if ranks == 1 else model_of_rank(model, ranks, model.experts)


@dataclass(frozen=True)
class Memory:
    """What a layout needs and has, in bytes of one device."""

    worker: float
    """Weights of an attention worker's rank."""
    server: float
    """Experts of the fullest server."""
    room: float
    """What a plan may fill."""
    token: float
    """Keys and values of a token on one rank."""
    beside: bool

    @property
    def left(self) -> float:
        """Bytes for keys and values on one rank; negative if the weights do not fit."""
        if self.beside:
            return self.room - self.worker - self.server
        return -1.0 if self.server > self.room else self.room - self.worker

    @property
    def kv_tokens(self) -> int:
        """Tokens of a worker's KV cache; 0 if the weights do not fit."""
        return max(0, math.floor(self.left / self.token))


def memory(model: ModelSizes, layout: Layout, min_replicas: int = 1, redundant: int = 0) -> Memory:
    """The memory of a layout whose experts have these copies."""
    rank = attention_model(model, layout.ranks)
    number = model.number if layout.pool.on_gpu else 4.0
    least = max(min_replicas, layout.spread if layout.copied else 1)
    copies = max(model.experts * least, model.experts + redundant)
    held = model.moe_layers * -(-copies // layout.servers) * model.expert_bytes
    return Memory(
        replace(rank, experts=model.experts).other,
        held,
        layout.pool.hardware.fast.room,
        model.layers * rank.attention.cached * number,
        layout.beside,
    )
