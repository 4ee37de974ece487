"""Which processes serve: the ranks of an attention worker, and the processes of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import get_args

from moesaic.config.values import (
    Align,
    CollectivesBackend,
    DispatchName,
    ExecutorBackend,
    MoeCollectives,
    NumaBinding,
    Rebalance,
    Transport,
    at_least,
    capacity,
    require_one_of,
)
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of one attention worker: processes that share its attention heads and its experts."""

    tensor_parallel_size: int = 1
    """Ranks of each attention worker: processes that share its attention heads and its experts. Where a fast
    memory is given, each rank has that much and reads its own experts."""
    expert_tensor_parallel_size: int = 1
    """Number of neighbouring ranks that share each expert by its width. With 1 each rank holds whole
    experts."""
    moe_collectives: MoeCollectives | None = None
    """Collectives between attention and experts. deepspeed: all-reduce, two all-to-all, all-gather.
    all-reduce: each rank computes its own experts for all tokens. reduce-scatter: reduce-scatter, two
    all-to-all, all-gather. shuffled: the reduce-scatter sends each token to the rank whose experts it should
    choose (Speculative MoE). None: shuffled if the placement has tables, else reduce-scatter."""
    collectives_backend: CollectivesBackend = "host"
    """What carries the rows that ranks exchange. host: memory of the host, or TCP between hosts. nccl:
    NVIDIA's NCCL, between GPUs of one host, without a copy to RAM. gloo: torch's gloo, between processes of
    one host on a CPU; it is there to test the code of nccl."""
    shuffle_align: Align = "move"
    """How shuffled tokens are divided among the ranks. move: each rank gets the same number, and the tokens
    with the least certain prediction move. variable: each rank gets any number."""
    placement: str | None = None
    """File that says which server or rank holds which experts; see `moesaic place`. None: each holds the same
    number, and expert servers exchange experts later by measured load."""
    nnodes: int = 1
    """Number of hosts that share the ranks of each attention worker equally. The other hosts join with
    `moesaic join --role ranks`, and serving begins once they have."""

    def __post_init__(self) -> None:
        size, expert_size = self.tensor_parallel_size, self.expert_tensor_parallel_size
        at_least("--tensor-parallel-size", size, 1)
        for flag, parts in (("--expert-tensor-parallel-size", expert_size), ("--nnodes", self.nnodes)):
            if parts < 1 or size % parts:
                divisors = ", ".join(str(divisor) for divisor in range(1, size + 1) if size % divisor == 0)
                choices = f"{divisors}, what divides --tensor-parallel-size {size}"
                raise ConfigError.field(flag, parts, choices)
        if self.moe_collectives is not None:
            require_one_of("--moe-collectives", self.moe_collectives, get_args(MoeCollectives))
            if size == 1:
                raise ConfigError.field("--tensor-parallel-size", 1, "at least 2 with --moe-collectives")
        self._check_backend()
        require_one_of("--shuffle-align", self.shuffle_align, get_args(Align))
        if self.shuffle_align != ParallelConfig.shuffle_align:
            if size == 1:
                raise ConfigError.field("--tensor-parallel-size", 1, "at least 2 with --shuffle-align")
            if self.moe_collectives not in (None, "shuffled"):
                choices = "shuffled with --shuffle-align"
                raise ConfigError.field("--moe-collectives", self.moe_collectives, choices)

    def _check_backend(self) -> None:
        require_one_of("--collectives-backend", self.collectives_backend, get_args(CollectivesBackend))
        if self.collectives_backend == "host":
            return
        if self.tensor_parallel_size == 1:
            raise ConfigError.field("--tensor-parallel-size", 1, "at least 2 with --collectives-backend")
        if self.nnodes > 1:  # neither of them encrypts
            choices = f"1 with --collectives-backend {self.collectives_backend}"
            raise ConfigError.field("--nnodes", self.nnodes, choices)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a worker on each host."""
        return self.tensor_parallel_size // self.nnodes

    @property
    def expert_parallel_size(self) -> int:
        """Number of parts that the experts of a layer are divided into: one for each rank, or one for each
        group of ranks that share their experts."""
        return self.tensor_parallel_size // self.expert_tensor_parallel_size


RANKS_WITH_EXPERTS = ("moe_collectives", "shuffle_align", "expert_tensor_parallel_size")
"""Settings of ranks that hold experts. With expert servers they do not."""


@dataclass(frozen=True)
class ClusterConfig(ParallelConfig):
    """Which processes serve, and which of them holds which experts."""

    attention_workers: int = 1
    """Processes that compute everything but the routed experts, each with a KV cache of its own."""
    expert_servers: int = 0
    """Processes that hold and compute the routed experts. 0: each attention worker computes them itself."""
    prefill_workers: int = 0
    """Processes that compute the prompts of the attention workers, so that no prompt delays another request's
    next token. Their keys and values then travel to the worker that generates. 0: attention workers compute
    prompts themselves."""
    redundant_experts: int = 0
    """Copies of experts in each layer beyond one of each, or beyond those of a --placement."""
    min_replicas: int = 1
    """Minimum number of servers that hold each expert. With 2 no request waits when a server dies. They are
    on different hosts, as far as capacities allow."""
    expert_capacities: str | None = None
    """Capacity weight of each expert server, such as 2,1: its share of the experts and of the load. A server
    that is added later has the last weight. None: all servers have the same weight."""
    rebalance_interval: float = 60.0
    """Seconds between two checks of the experts' load. After a check experts move where that pays; 0: never.
    With a --placement only its further copies move, unless --rebalance says otherwise."""
    rebalance: Rebalance | None = None
    """What makes experts move, also those of a --placement. load: they move to where the load is even.
    routing, with --enable-expert-parallel: placement and dispatch tables are solved anew from the requests of
    the last interval, and swapped where the predicted gain exceeds the cost. None: load, but experts of a
    --placement stay."""
    autoscale: str | None = None
    """Limits of the numbers of processes. MIN:MAX is for expert servers, or for ranks with
    --enable-expert-parallel; attention-workers=1:3,prefill-workers=1:2,expert-servers=2:6 names them.
    Processes are added and removed by how busy they are, how many requests wait, and whether --slo-ttft and
    --slo-itl are met. None: numbers change only by command."""
    unavailable_timeout: float | None = None
    """Seconds of an outage during which requests wait for the processes that are restarted. Then /health and
    requests without a token get status 503 until requests are computed again. After five times as long
    without a replacement the server ends. None: 60, or twice as long as the last start if that is more."""
    slo_ttft: float | None = None
    """Objective: milliseconds from a request's arrival to its first token."""
    slo_itl: float | None = None
    """Objective: milliseconds between two tokens of a request."""
    numa: NumaBinding = "auto"
    """On a machine with several NUMA nodes, such as sockets. auto: each expert server runs on one node and
    takes that node's memory, and `serve` starts one on each node if no number of processes is given. off:
    processes run anywhere."""
    devices: str | None = None
    """GPUs that processes take in turn, by CUDA's numbers or UUIDs with commas between: attention workers
    first, then prefill workers, then expert servers. A group of ranks takes as many as it has ranks. Implies
    --device cuda. None: those of CUDA_VISIBLE_DEVICES, or all."""
    distributed_executor_backend: ExecutorBackend = "local"
    """Where the processes run. local: on this host; mp means the same. ray: on the nodes of the Ray cluster
    of RAY_ADDRESS, or of this host."""
    paced: str | None = None
    """TOML file of modelled devices. Workers and servers compute as always, and hold each result until the
    modelled device would have finished. A test instrument: it makes everything slower."""
    schedule_policy_file: str | None = None
    """TOML file that says how long a run of so many rows takes on these devices, and what follows from it:
    which tokens go on without the others, and for which calls an expert server waits. A file of --paced is
    one too. None: the curves of this machine, which `moesaic doctor` shows."""
    topology: str | None = None
    """File of hosts, the processes on each and the links between them (.toml or .json). Attention workers
    then prefer the replicas of an expert that are near, and requests go to workers near their experts. None:
    the links to hosts that join are measured, and all processes of one host count as near."""
    transport: Transport = "auto"
    """Transport between attention workers and expert servers of this host. shm: shared memory. socket: a Unix
    socket. auto: shm if this installation has it. Servers of other hosts are reached through TCP. nixl: they
    are reached by one-sided writes, which are not encrypted, and those of this host as with auto. cuda_ipc:
    shared memory, and rows stay on the GPUs of this host; needs --device cuda. nvshmem: GPUs of all hosts
    exchange the rows of decode steps by NVSHMEM, which is not encrypted, and all else goes as with auto;
    needs --cudagraph-mode full."""
    nvshmem_pes: int | None = None
    """Number of attention workers and expert servers, of all hosts, with which the NVSHMEM job of --transport
    nvshmem is formed. None: --attention-workers and --expert-servers together."""
    cluster_address: str | None = None
    """tcp:HOST:PORT at which processes of other hosts join; see `moesaic join`. Expert servers of this host
    listen on free ports of HOST."""
    standby_for: str | None = None
    """tcp:HOST:PORT, the --cluster-address of another `moesaic serve`. This one watches it, and begins to
    serve once that one is gone. It starts no processes: those that join it take the places of
    --attention-workers, --expert-servers and --prefill-workers. None: serve at once."""
    cluster_secret_file: str | None = None
    """File with the secret that processes have to know to join. It is created, with mode 600, if it does not
    exist."""
    data_parallel_size: int | None = None
    """Number of ranks: it sets --attention-workers."""
    enable_expert_parallel: bool = False
    """Each rank of --data-parallel-size has an expert server beside its attention worker. The two share the
    rank's cores, and the worker asks its own server first. It sets --expert-servers."""
    dispatch: DispatchName | None = None
    """Which attention worker gets a request. affinity: the worker beside the experts that its prompt should
    use, by the placement's tables. affinity-rounds: the same, with one request for each worker in turn
    (Sem-MoE). least-loaded: the worker with the most free KV blocks. round-robin: each in turn. None:
    affinity if ranks have servers and the placement has tables, else least-loaded."""

    @property
    def has_several_processes(self) -> bool:
        """True if there are several processes, or may be: workers, expert servers or ranks."""
        starts_several = self.attention_workers > 1 or self.prefill_workers > 0 or self.expert_servers > 0
        # A cluster that begins with one process may still get others.
        may_change = self.autoscale is not None or self.cluster_address is not None
        return starts_several or self.tensor_parallel_size > 1 or may_change or self.on_ray

    @property
    def on_ray(self) -> bool:
        """True if a Ray cluster has the processes."""
        return self.distributed_executor_backend == "ray"

    @property
    def is_remote(self) -> bool:
        """True if no process is started on this host."""
        return self.on_ray or self.standby_for is not None

    @property
    def capacities(self) -> tuple[float, ...]:
        """The weights of --expert-capacities; empty without it. Example: "2,0.5" -> (2.0, 0.5)."""
        if self.expert_capacities is None:
            return ()
        return tuple(capacity("--expert-capacities", part) for part in self.expert_capacities.split(","))

    @property
    def parallel(self) -> ParallelConfig:
        """The ranks of each attention worker. A placement is theirs where they share the experts; else it is
        that of the expert servers."""
        own_fields = {field.name: getattr(self, field.name) for field in fields(ParallelConfig)}
        ranks_hold_experts = self.tensor_parallel_size > 1 and self.expert_servers == 0
        return ParallelConfig(**own_fields if ranks_hold_experts else own_fields | {"placement": None})

    def resolve(self) -> ClusterConfig:
        """The same, with --attention-workers and --expert-servers as --data-parallel-size sets them.

        Raises ConfigError where they were given and say something else.
        """
        ranks = self.data_parallel_size
        if ranks is None:
            return self
        at_least("--data-parallel-size", ranks, 1)
        servers = ranks if self.enable_expert_parallel else self.expert_servers
        for name, value in (("attention_workers", ranks), ("expert_servers", servers)):
            value_now = getattr(self, name)
            if value_now not in (value, getattr(ClusterConfig, name)):
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(flag, value_now, f"{value} with --data-parallel-size {ranks}")
        if (self.attention_workers, self.expert_servers) == (ranks, servers):
            return self
        return replace(self, attention_workers=ranks, expert_servers=servers)

    def on_nodes(self, count: int) -> ClusterConfig:
        """The same, with an expert server for each of `count` NUMA nodes.

        Unchanged for one node, with --numa off, and if processes are given.
        """
        if count < 2 or self.numa == "off" or self.resolve().has_several_processes:
            return self
        return replace(self, expert_servers=count)

    def __post_init__(self) -> None:
        if self.data_parallel_size is None and self.enable_expert_parallel:
            raise ConfigError("--enable-expert-parallel: give the number of ranks as --data-parallel-size")
        if self.resolve() is not self:
            return  # what was resolved has been checked
        super().__post_init__()
        at_least("--attention-workers", self.attention_workers, 1)
        at_least("--expert-servers", self.expert_servers, 0)
        at_least("--prefill-workers", self.prefill_workers, 0)
        at_least("--redundant-experts", self.redundant_experts, 0)
        at_least("--min-replicas", self.min_replicas, 1)
        if not 0 <= self.rebalance_interval < math.inf:
            raise ConfigError.field("--rebalance-interval", self.rebalance_interval, "seconds, 0 or more")
        if self.unavailable_timeout is not None and not 0 < self.unavailable_timeout < math.inf:
            raise ConfigError.field("--unavailable-timeout", self.unavailable_timeout, "seconds, more than 0")
        self._check_rebalance()
        self._check_devices()
        if self.paced is not None and self.schedule_policy_file is not None:
            raise ConfigError("--paced and --schedule-policy-file: give one, since --paced has curves too")
        require_one_of("--numa", self.numa, get_args(NumaBinding))
        require_one_of("--transport", self.transport, get_args(Transport))
        if self.transport == "shm" and self.cluster_address is not None:
            raise ConfigError.field("--transport", "shm", "auto, socket with --cluster-address")
        if self.transport == "nixl" and self.cluster_address is None and not self.on_ray:
            choices = "auto, shm, socket without --cluster-address: nixl is for servers of other hosts"
            raise ConfigError.field("--transport", "nixl", choices)
        self._check_backend()
        self._check_hosts()
        if (self.cluster_address is None) != (self.cluster_secret_file is None) and not self.on_ray:
            raise ConfigError("--cluster-address and --cluster-secret-file: give both or none")
        self._check_standby()
        for name in RANKS_WITH_EXPERTS if self.expert_servers > 0 else ():
            value, default = getattr(self, name), getattr(ClusterConfig, name)
            if value != default:
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(
                    flag, value, f"{default} with --expert-servers: ranks hold no experts"
                )
        self._check_objectives()
        if self.dispatch is not None:
            require_one_of("--dispatch", self.dispatch, get_args(DispatchName))
            if not self.has_several_processes:
                raise ConfigError.field("--attention-workers", 1, "at least 2 with --dispatch")
        self._check_servers()

    def _check_servers(self) -> None:
        """Raises ConfigError for settings of expert servers without them, or that do not fit their number."""
        if self.expert_servers == 0:
            names = ["redundant_experts", "min_replicas", "expert_capacities", "transport"]
            names += ["rebalance", "paced", "schedule_policy_file", "topology"]
            names += ["autoscale"] * self._scales_servers
            for name in names if self.tensor_parallel_size > 1 else ["placement", *names]:
                if getattr(self, name) != getattr(ClusterConfig, name):
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError.field("--expert-servers", 0, f"at least 1 with {flag}")
        elif self.min_replicas > self.expert_servers:
            raise ConfigError.field(
                "--min-replicas", self.min_replicas, f"at most --expert-servers, {self.expert_servers}"
            )
        elif self.capacities and len(self.capacities) != self.expert_servers:
            choices = f"{self.expert_servers} numbers, one for each of --expert-servers"
            raise ConfigError.field("--expert-capacities", self.expert_capacities, choices)

    def _check_backend(self) -> None:
        flag = "--distributed-executor-backend"
        require_one_of(flag, self.distributed_executor_backend, get_args(ExecutorBackend))
        reasons = {
            "devices": "Ray gives each process its GPUs",
            "paced": "its file is on this host only",
            "schedule_policy_file": "its file is on this host only",
        }
        for name, reason in reasons.items() if self.on_ray else ():
            if getattr(self, name) is not None:
                name_flag = "--" + name.replace("_", "-")
                raise ConfigError.field(name_flag, getattr(self, name), f"nothing with {flag} ray: {reason}")
        if self.on_ray and self.rebalance == "routing":
            choices = f"load with {flag} ray: routes are recorded in files of this host"
            raise ConfigError.field("--rebalance", "routing", choices)
        if self.on_ray and self.transport == "shm":
            raise ConfigError.field("--transport", "shm", f"auto, socket with {flag} ray")

    def _check_standby(self) -> None:
        """Raises ConfigError for settings that make no sense where all processes join."""
        if self.standby_for is None:
            return
        if self.cluster_address is None:
            raise ConfigError("--standby-for: give --cluster-address too, at which processes join this host")
        if self.on_ray:
            raise ConfigError.field("--standby-for", self.standby_for, "nothing with Ray")
        for name, reason in (
            ("devices", "a process that joins has the GPUs of its host"),
            ("enable_expert_parallel", "no server is a worker's own"),
            ("placement", "the servers that join have any order"),
            ("nnodes", "a standby starts no rank itself"),
        ):
            if getattr(self, name) != getattr(ClusterConfig, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(flag, getattr(self, name), f"nothing with --standby-for: {reason}")

    def _check_hosts(self) -> None:
        """Raises ConfigError for what groups over several hosts cannot go with."""
        if self.nnodes == 1:
            return
        if self.on_ray:
            choices = "1 with --distributed-executor-backend ray: a group of ranks is on one node"
            raise ConfigError.field("--nnodes", self.nnodes, choices)
        if self.cluster_address is None:
            raise ConfigError.field("--nnodes", self.nnodes, "1 without --cluster-address, where hosts join")
        if self.autoscale is not None:
            choices = "nothing with --nnodes: no host can be added for a group by itself"
            raise ConfigError.field("--autoscale", self.autoscale, choices)

    @property
    def _scales_servers(self) -> bool:
        """Whether --autoscale has limits for expert servers: those without a name, or with theirs."""
        limits = [] if self.autoscale is None else self.autoscale.split(",")
        return any("=" not in part or part.strip().startswith("expert-servers=") for part in limits)

    def _check_rebalance(self) -> None:
        if self.rebalance is None:
            return
        require_one_of("--rebalance", self.rebalance, get_args(Rebalance))
        if not self.rebalance_interval:
            raise ConfigError.field("--rebalance-interval", 0, "more than 0 with --rebalance")
        if self.rebalance == "load" or not self.expert_servers:
            return
        if not self.enable_expert_parallel:
            choices = "load without --enable-expert-parallel: no server is then a worker's own"
            raise ConfigError.field("--rebalance", "routing", choices)
        if self.dispatch in ("least-loaded", "round-robin"):
            choices = "affinity, affinity-rounds with --rebalance routing"
            raise ConfigError.field("--dispatch", self.dispatch, choices)

    def _check_devices(self) -> None:
        names = [] if self.devices is None else [name.strip() for name in self.devices.split(",")]
        if not all(names) or len(set(names)) < len(names):
            choices = "CUDA's numbers or UUIDs with commas between, such as 0,1,2, each once"
            raise ConfigError.field("--devices", self.devices, choices)

    def _check_objectives(self) -> None:
        for flag, limit in (("--slo-ttft", self.slo_ttft), ("--slo-itl", self.slo_itl)):
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError.field(flag, limit, "milliseconds, more than 0")
            if limit is not None and not self.has_several_processes:
                raise ConfigError.field(
                    "--attention-workers", 1, f"at least 2, or expert servers, with {flag}"
                )
