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
    is_colocated: bool = False
    """Whether server i shares the device of worker i (data and expert parallelism)."""
    attention_hosts: int = 1
    """Hosts that have attention workers, each of them as many. 1: the first host has all workers."""
    is_replicated: bool = False
    """Whether the servers of each host have all experts, so that no row leaves its host."""

    @property
    def attention_devices(self) -> int:
        return self.workers * self.ranks

    @property
    def devices(self) -> int:
        """Devices that are used."""
        return self.attention_devices + (0 if self.is_colocated else self.servers)

    @property
    def first_host_workers(self) -> int:
        """Attention workers on the first host."""
        return self.workers // self.attention_hosts

    @property
    def first_host_servers(self) -> int:
        """Expert servers on the first host."""
        if self.is_colocated or self.attention_hosts > 1:
            return self.servers // self.attention_hosts
        return min(self.servers, self.pool.devices_per_host - self.attention_devices)

    @property
    def hosts(self) -> int:
        """Hosts that are used."""
        if self.attention_hosts > 1:
            return self.attention_hosts
        return 1 + -(-(self.servers - self.first_host_servers) // self.pool.devices_per_host)

    @property
    def price_per_hour(self) -> float | None:
        """Price of the hosts that are used. None if they have no price."""
        return None if self.pool.price_per_hour is None else self.hosts * self.pool.price_per_hour

    def link(self, inter_host_link: LinkModel) -> LinkModel:
        """The link between workers and servers. If rows leave hosts, all of it is the one between hosts."""
        return self.pool.intra_host_link if self.hosts == 1 or self.is_replicated else inter_host_link

    @property
    def host_layout(self) -> Layout:
        """What one host has, where all hosts have all experts."""
        if not self.is_replicated:
            return self
        counts = self.first_host_workers, self.ranks, self.first_host_servers
        return Layout(self.pool, *counts)

    def describe(self) -> str:
        """The processes in words."""
        if self.is_colocated:
            return f"{self.workers} x (attention and experts)"
        ranks = f" of {self.ranks} ranks" if self.ranks > 1 else ""
        if self.attention_hosts == 1:
            return f"{self.workers} attention{ranks} + {self.servers} experts"
        host_text = f"({self.first_host_workers} attention{ranks} + {self.first_host_servers} experts)"
        experts_text = ", all experts on each" if self.is_replicated else ""
        return f"{self.attention_hosts} hosts x {host_text}{experts_text}"


def list_separate_layouts(pool: Pool, model: ModelSizes) -> Iterator[Layout]:
    """Attention workers on the first host, and expert servers on other devices of any host.

    The first host has a server too, since `serve` begins with one.
    """
    for ranks in _rank_counts(pool, model):
        for workers in _process_counts((pool.devices_per_host - 1) // ranks):
            for servers in _process_counts(min(pool.devices - workers * ranks, model.experts)):
                yield Layout(pool, workers, ranks, servers)


def list_colocated_layouts(pool: Pool, model: ModelSizes) -> Iterator[Layout]:
    """Ranks of one host, each with the attention of its requests and a part of the experts."""
    for ranks in _process_counts(min(pool.devices_per_host, model.experts)):
        yield Layout(pool, ranks, 1, ranks, is_colocated=True)


def list_spread_layouts(pool: Pool, model: ModelSizes) -> Iterator[Layout]:
    """Several whole hosts, each with as many attention workers and expert servers as the others.

    The experts are divided among all servers, or each host has all of them.
    """
    for hosts in sorted({pool.hosts, *(count for count in (2, 4, 8, 16) if count < pool.hosts)} - {1}):
        for ranks in _rank_counts(pool, model):
            for workers in _process_counts((pool.devices_per_host - 1) // ranks):
                servers = pool.devices_per_host - workers * ranks
                if servers * hosts <= model.experts:
                    yield Layout(pool, workers * hosts, ranks, servers * hosts, attention_hosts=hosts)
                if hosts <= servers <= model.experts:  # serve begins with a server for each copy
                    yield Layout(
                        pool,
                        workers * hosts,
                        ranks,
                        servers * hosts,
                        attention_hosts=hosts,
                        is_replicated=True,
                    )


FORMS: tuple[Callable[[Pool, ModelSizes], Iterator[Layout]], ...] = (
    list_separate_layouts,
    list_colocated_layouts,
    list_spread_layouts,
)


def list_layouts(spec: ClusterSpec, model: ModelSizes) -> Iterator[Layout]:
    """All layouts of all forms."""
    for pool in spec.pools:
        for form in FORMS:
            yield from form(pool, model)


def _rank_counts(pool: Pool, model: ModelSizes) -> list[int]:
    """Possible numbers of ranks of a worker. Measured curves are those of one device."""
    # Ranks divide the heads of attention, so a kind of attention without heads has one rank.
    heads = getattr(model.attention, "heads", None)
    if pool.curves is not None or not isinstance(heads, int):
        return [1]
    return [ranks for ranks in (1, 2, 4, 8) if ranks <= pool.devices_per_host and heads % ranks == 0]


def _process_counts(limit: int) -> list[int]:
    """Numbers of processes that are tried: all up to MOST_SMALL, then steps of an eighth."""
    counts = list(range(1, min(limit, MOST_SMALL) + 1))
    while counts and counts[-1] < limit:
        counts.append(min(limit, counts[-1] + max(1, counts[-1] // 8)))
    return counts


def attention_model(model: ModelSizes, ranks: int) -> ModelSizes:
    """The sizes of one rank of an attention worker."""
    return model if ranks == 1 else model_of_rank(model, ranks, model.experts)


@dataclass(frozen=True)
class Memory:
    """What a layout needs and has, in bytes of one device."""

    worker_bytes: float
    """Weights of an attention worker's rank."""
    server_bytes: float
    """Experts of the fullest server."""
    usable_bytes: float
    """What a plan may fill."""
    token_bytes: float
    """Keys and values of a token on one rank."""
    is_colocated: bool

    @property
    def cache_bytes(self) -> float:
        """Bytes for keys and values on one rank; negative if the weights do not fit."""
        if self.is_colocated:
            return self.usable_bytes - self.worker_bytes - self.server_bytes
        return -1.0 if self.server_bytes > self.usable_bytes else self.usable_bytes - self.worker_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens of a worker's KV cache; 0 if the weights do not fit."""
        return max(0, math.floor(self.cache_bytes / self.token_bytes))


def compute_memory(model: ModelSizes, layout: Layout, min_replicas: int = 1, redundant: int = 0) -> Memory:
    """The memory of a layout whose experts have these copies."""
    rank = attention_model(model, layout.ranks)
    # A CPU caches keys and values in float32 by default.
    number = model.number if layout.pool.on_gpu else 4.0
    min_copies = max(min_replicas, layout.attention_hosts if layout.is_replicated else 1)
    copies = max(model.experts * min_copies, model.experts + redundant)
    expert_bytes = model.moe_layers * -(-copies // layout.servers) * model.expert_bytes
    return Memory(
        replace(rank, experts=model.experts).other,
        expert_bytes,
        layout.pool.hardware.fast.room,
        model.layers * rank.attention.cached * number,
        layout.is_colocated,
    )
