"""Which processes serve, and an expert server among them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import get_args

from moesaic.config.values import (
    Align,
    DispatchName,
    Form,
    KernelName,
    QueuePolicyName,
    Schedule,
    Transport,
    at_least,
    capacity,
    one_of,
)
from moesaic.config.worker import GroupConfig, QueueConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout


@dataclass(frozen=True)
class ClusterConfig:
    """Which processes serve, and who holds which experts."""

    attention_workers: int = 1
    """Processes that compute everything but the routed experts, each with its own KV cache."""
    expert_servers: int = 0
    """Processes that hold the routed experts; 0: each attention worker computes them itself."""
    redundant_experts: int = 0
    """Expert copies of each layer beyond one of each; a --placement has its own."""
    min_replicas: int = 1
    """Servers that hold each expert, at least; with 2 no request waits when a server dies."""
    expert_capacities: str | None = None
    """Capacity weight of each expert server, such as 2,1: its share of the experts and of the load. Servers
    that are added later have the last one's. None: the threads of a server, the same for all."""
    placement: str | None = None
    """File that says which server holds which experts; None: the same number each, by measured load later."""
    rebalance_interval: float = 60.0
    """Seconds between two looks at the experts' load, after which some move where that is worth it; 0: never.
    A placement from a file stays what it is."""
    autoscale: str | None = None
    """MIN:MAX expert servers, added and removed by how busy they are, how many requests wait, and whether
    --slo-ttft and --slo-itl are kept; None: only by hand."""
    slo_ttft: float | None = None
    """Milliseconds from a request's arrival to its first token that should not be exceeded."""
    slo_itl: float | None = None
    """Milliseconds between two tokens of a request that should not be exceeded."""
    transport: Transport = "auto"
    """Between attention workers and expert servers of this host: shm, memory that they share; socket, a Unix
    socket; auto: shm where this installation can. Servers of other hosts are reached through TCP."""
    cluster_address: str | None = None
    """tcp:HOST:PORT where expert servers of other machines may join; see `moesaic join`."""
    cluster_secret_file: str | None = None
    """File with the secret that they have to know; made, with mode 600, where there is none."""
    tensor_parallel_size: int = 1
    """Ranks of each attention worker: processes that share its attention heads and its experts."""
    expert_tensor_parallel_size: int = 1
    """Neighbouring ranks that hold a part of each expert's width, in place of whole experts."""
    moe_collectives: Form | None = None
    """How the ranks meet between attention and experts: deepspeed (all-reduce, all-to-all twice, all-gather),
    all-reduce (no token travels), reduce-scatter, or shuffled (a row is scattered to where its experts are
    expected; Speculative MoE). None: shuffled where the placement has tables, else reduce-scatter."""
    shuffle_align: Align = "move"
    """Of shuffled rows: move, equal shards, the least sure rows give way; variable, shards of any size."""
    data_parallel_size: int | None = None
    """Ranks: as many attention workers, in place of --attention-workers."""
    enable_expert_parallel: bool = False
    """With --data-parallel-size: each rank has an expert server beside its attention worker, asked first and
    sharing its cores, in place of --expert-servers."""
    dispatch: DispatchName | None = None
    """Which attention worker gets a request: affinity, beside the experts that its prompt should use, by the
    placement's tables; affinity-rounds, each one in turn (Sem-MoE); least-loaded, most free KV blocks;
    round-robin. None: affinity where ranks have servers and the placement has tables, else least-loaded."""

    @property
    def apart(self) -> bool:
        """Whether there is more than one worker that does everything."""
        return self.attention_workers > 1 or self.expert_servers > 0 or self.tensor_parallel_size > 1

    @property
    def capacities(self) -> tuple[float, ...]:
        """What --expert-capacities says; empty: nothing. Example: "2,0.5" -> (2.0, 0.5)."""
        if self.expert_capacities is None:
            return ()
        return tuple(capacity("--expert-capacities", part) for part in self.expert_capacities.split(","))

    @property
    def group(self) -> GroupConfig:
        """Of each attention worker. Raises ConfigError for what cannot be one."""
        size, shared = self.tensor_parallel_size, self.expert_tensor_parallel_size
        placement = self.placement if size > 1 else None
        return GroupConfig(size, shared, self.moe_collectives, self.shuffle_align, placement)

    def __post_init__(self) -> None:
        if self.data_parallel_size is None and self.enable_expert_parallel:
            raise ConfigError("--enable-expert-parallel: give the number of ranks as --data-parallel-size")
        if self.data_parallel_size is not None:
            self._set_ranks(self.data_parallel_size)
        at_least("--attention-workers", self.attention_workers, 1)
        at_least("--expert-servers", self.expert_servers, 0)
        at_least("--redundant-experts", self.redundant_experts, 0)
        at_least("--min-replicas", self.min_replicas, 1)
        if not 0 <= self.rebalance_interval < math.inf:
            raise ConfigError.field("--rebalance-interval", self.rebalance_interval, "seconds, 0 or more")
        one_of("--transport", self.transport, get_args(Transport))
        if self.transport == "shm" and self.cluster_address is not None:
            raise ConfigError.field("--transport", "shm", "auto, socket with --cluster-address")
        if (self.cluster_address is None) != (self.cluster_secret_file is None):
            raise ConfigError("--cluster-address and --cluster-secret-file: give both or none")
        if self.group.size > 1 and self.expert_servers > 0:
            raise ConfigError.field("--expert-servers", self.expert_servers, "0 with --tensor-parallel-size")
        self._check_objectives()
        if self.dispatch is not None:
            one_of("--dispatch", self.dispatch, get_args(DispatchName))
            if not self.apart:
                raise ConfigError.field("--attention-workers", 1, "at least 2 with --dispatch")
        if self.expert_servers == 0:
            names = ["redundant_experts", "min_replicas", "expert_capacities", "autoscale", "transport"]
            names.append("cluster_address")
            for name in names if self.tensor_parallel_size > 1 else ["placement", *names]:
                if getattr(self, name) != getattr(ClusterConfig, name):
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError.field("--expert-servers", 0, f"at least 1 with {flag}")
        elif self.min_replicas > self.expert_servers:
            raise ConfigError.field(
                "--min-replicas", self.min_replicas, f"at most --expert-servers, {self.expert_servers}"
            )
        elif self.capacities and len(self.capacities) != self.expert_servers:
            allowed = f"{self.expert_servers} numbers, one for each of --expert-servers"
            raise ConfigError.field("--expert-capacities", self.expert_capacities, allowed)
        for name in ("redundant_experts", "min_replicas") if self.placement is not None else ():
            given, default = getattr(self, name), getattr(ClusterConfig, name)
            if given != default:
                allowed = f"{default} with --placement, whose file says where copies are (moesaic place "
                allowed += "--redundant-experts puts them in)"
                raise ConfigError.field("--" + name.replace("_", "-"), given, allowed)

    def _check_objectives(self) -> None:
        for flag, limit in (("--slo-ttft", self.slo_ttft), ("--slo-itl", self.slo_itl)):
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError.field(flag, limit, "milliseconds, more than 0")
            if limit is not None and not self.apart:
                raise ConfigError.field(
                    "--attention-workers", 1, f"at least 2, or expert servers, with {flag}"
                )

    def _set_ranks(self, ranks: int) -> None:
        """The number of processes follows from the number of ranks."""
        at_least("--data-parallel-size", ranks, 1)
        servers = ranks if self.enable_expert_parallel else self.expert_servers
        for name, value in (("attention_workers", ranks), ("expert_servers", servers)):
            given = getattr(self, name)
            if given not in (value, getattr(ClusterConfig, name)):
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(flag, given, f"{value} with --data-parallel-size {ranks}")
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class RanksConfig:
    """One worker that may be a group of processes; ClusterConfig has the same of several."""

    tensor_parallel_size: int = 1
    """Ranks: processes that share the model's attention heads and its experts. With --fast-memory each has
    that much, and reads its own experts."""
    moe_collectives: Form | None = None
    """How the ranks meet between attention and experts, as of `moesaic serve`."""
    placement: str | None = None
    """With --tensor-parallel-size: file that says which rank holds which experts; None: as many each."""

    def __post_init__(self) -> None:
        if self.placement is not None and self.tensor_parallel_size == 1:
            raise ConfigError.field("--tensor-parallel-size", 1, "at least 2 with --placement")
        self.group  # noqa: B018  refused here

    @property
    def group(self) -> GroupConfig:
        """Of the worker. Raises ConfigError for what cannot be one."""
        return GroupConfig(self.tensor_parallel_size, form=self.moe_collectives, placement=self.placement)


@dataclass(frozen=True)
class ExpertServerConfig:
    """All that an expert server's process needs to know."""

    model: str
    """A directory."""
    layout: ExpertLayout
    address: str
    """Where to listen: unix:PATH, unix:@NAME (@ alone: any free name) or tcp:HOST:PORT (0: any free port)."""
    kernels: KernelName = "auto"
    mmap: bool = True
    """Whether weights stay in the mapped files."""
    device: str = "cpu"
    threads: int = 1
    cpus: tuple[int, ...] = ()
    """Cores that this process is kept on; none: any."""
    schedule: Schedule = "lockstep"
    queue_policy: QueuePolicyName = "defrag"
    queues: QueueConfig = QueueConfig()
    trace: str | None = None
    """File for its part of a trace; None: nothing is written down."""

    def to_json(self) -> str:
        """For the command line of its process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExpertServerConfig:
        """The inverse of `to_json`."""
        parts = json.loads(text)
        layout, queues = parts.pop("layout"), QueueConfig(**parts.pop("queues"))
        prefixes = {int(layer): prefix for layer, prefix in layout.pop("prefixes").items()}
        return cls(layout=ExpertLayout(prefixes=prefixes, **layout), queues=queues, **parts)
