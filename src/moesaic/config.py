"""Every setting, frozen and documented field by field. The command line is generated from here.

The only file that reads the environment. Nothing is ever written back: `resolve_*` functions
return new values.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Schedule = Literal["barrier", "lockstep", "async"]
QueuePolicyName = Literal["defrag", "mtfs", "flfs"]
Combine = Literal["exact", "partial"]
Form = Literal["deepspeed", "all-reduce", "reduce-scatter", "shuffled"]
Align = Literal["move", "variable"]
DispatchName = Literal["affinity", "affinity-rounds", "least-loaded", "round-robin"]
KernelName = Literal["auto", "avx512", "avx2", "portable", "reference"]
HostTransport = Literal["shm", "socket"]
"""Between processes of one host."""
Transport = Literal["auto", HostTransport]

SMALL_MODEL = 1 << 28
"""Bytes of weights below which one thread computes: at each of the many small products several threads
lose more waiting for each other than they gain, above all beside the API's own process."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(name: str, text: str | int) -> int:
    """'512MiB', '4GB', '2g' or a plain number of bytes. Raises ConfigError naming `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or float(match.group(1)) <= 0:
        raise ConfigError.field(name, text, "a positive size such as 512MiB, 4GiB or 4GB")
    return int(float(match.group(1)) * unit)


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is computed."""

    model: str
    """A Hugging Face directory, a hub id, or `demo`, the checkpoint inside the package."""
    _: KW_ONLY
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    device: Device = "auto"
    """Where to compute; auto takes CUDA when there is one."""
    dtype: Dtype = "auto"
    """Storage of the weights; auto: the checkpoint's own (on a CPU float32 in place of float16). A CPU
    computes in float32."""
    max_model_len: int | None = None
    """Most tokens, prompt and answer together, of one request; None: the checkpoint's own limit."""
    threads: int | None = None
    """Threads that compute; None: one per core, and just one for a model of less than 256 MiB."""
    pin_threads: bool = False
    """Keep each of these threads on a core of its own."""
    enforce_eager: bool = False
    """Walk every step operation by operation instead of replaying recorded decode steps."""
    kernels: KernelName = "auto"
    """Implementation of the arithmetic on a CPU: the native kernels of one instruction set, or the torch
    reference; auto: the fastest that this CPU can run."""


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    kv_cache_memory: str = "auto"
    """Size of the KV cache, such as 4GiB; auto: what max_num_seqs requests of the maximum length
    need, at most 40 % of the memory left after the weights."""
    kv_cache_dtype: Dtype = "auto"
    """Storage of keys and values; auto: float32 on a CPU, the dtype of the weights on CUDA."""
    block_size: int = 16
    """Tokens in one KV block."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of finished requests and reuse them for equal prefixes."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Continuous batching."""

    max_num_seqs: int = 64
    """Most requests computed in one step."""
    max_num_batched_tokens: int = 2048
    """Most rows (prompt and generated tokens) computed in one step; longer prompts are chunked."""
    schedule: Schedule = "lockstep"
    """How attention workers and expert servers go together: barrier, all workers wait for each other at the
    experts of every layer; lockstep, each worker goes through the layers alone with its whole batch; async,
    rows go on as soon as their own experts have answered (Asynchronous Expert Parallelism)."""
    inflight_batches: int = 1
    """With --schedule lockstep: 2 halves each batch; one half computes while the other waits for experts."""
    queue_policy: QueuePolicyName = "defrag"
    """With --schedule async: which layer's waiting rows run next: defrag (Algorithm 1 of the paper), mtfs
    (most tokens first) or flfs (first layer first)."""
    combine: Combine = "exact"
    """What expert servers answer: exact, a row for each expert, which gives the bits of one process; partial,
    one weighted sum for each token and server: fewer bytes, equal up to rounding."""


@dataclass(frozen=True)
class GroupConfig:
    """The processes that are one attention worker together; see ClusterConfig for what they do."""

    size: int = 1
    expert_ranks: int = 1
    """Neighbouring ranks that share each expert."""
    form: Form | None = None
    """None: shuffled where the placement comes with tables, else reduce-scatter."""
    align: Align = "move"
    placement: str | None = None


@dataclass(frozen=True)
class WorkerConfig:
    """All that a worker process needs to know."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    group: GroupConfig = GroupConfig()
    remote_experts: bool = False
    """The routed experts are on servers that the supervisor names; else they are computed here."""
    supervised: bool = False
    """A supervisor waits for signs of life, also while there is nothing to do."""
    own_server: int | None = None
    """The expert server of this worker's own rank, asked first."""
    most_threads: int | None = None
    """Its share of the cores; None: all. `threads`, where it is given, goes before."""
    cpus: tuple[int, ...] = ()
    """Cores that this process is kept on; none: any."""
    transport: HostTransport = "shm"
    """To the expert servers of this host."""
    trace: str | None = None
    """File for a trace of what is done when: of all processes together where this config starts them, and
    its part of that in each process. None: nothing is written down."""
    record: str | None = None
    """The same for the experts that rows choose; see `trace.routing`."""
    record_share: float = 1.0
    """Of the requests, how many are in it."""

    def __post_init__(self) -> None:
        _one_of("--device", self.model.device, get_args(Device))
        _one_of("--dtype", self.model.dtype, get_args(Dtype))
        _one_of("--kernels", self.model.kernels, get_args(KernelName))
        _one_of("--kv-cache-dtype", self.cache.kv_cache_dtype, get_args(Dtype))
        if self.scheduler.inflight_batches not in (1, 2):
            raise ConfigError.field("--inflight-batches", self.scheduler.inflight_batches, "1 or 2")
        if self.scheduler.inflight_batches == 2 and self.scheduler.schedule != "lockstep":
            allowed = "lockstep with --inflight-batches 2"
            raise ConfigError.field("--schedule", self.scheduler.schedule, allowed)
        _one_of("--schedule", self.scheduler.schedule, get_args(Schedule))
        _one_of("--combine", self.scheduler.combine, get_args(Combine))
        _one_of("--queue-policy", self.scheduler.queue_policy, get_args(QueuePolicyName))
        _at_least("--max-num-seqs", self.scheduler.max_num_seqs, 1)
        _at_least("--max-num-batched-tokens", self.scheduler.max_num_batched_tokens, 1)
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            rows, seats = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
            raise ConfigError.field("--max-num-batched-tokens", rows, f"at least --max-num-seqs, {seats}")
        _at_least("--block-size", self.cache.block_size, 1)
        if self.model.max_model_len is not None:
            _at_least("--max-model-len", self.model.max_model_len, 2)
        if self.model.threads is not None:
            _at_least("--threads", self.model.threads, 1)
        if self.cache.kv_cache_memory != "auto":
            parse_bytes("--kv-cache-memory", self.cache.kv_cache_memory)

    def to_json(self) -> str:
        """For the command line of a worker process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """The inverse of `to_json`."""
        parts = json.loads(text)
        model, cache = ModelConfig(**parts.pop("model")), CacheConfig(**parts.pop("cache"))
        scheduler, cpus = SchedulerConfig(**parts.pop("scheduler")), tuple(parts.pop("cpus"))
        return cls(model, cache, scheduler, GroupConfig(**parts.pop("group")), cpus=cpus, **parts)


@dataclass(frozen=True)
class ClusterConfig:
    """Which processes serve, and who holds which experts."""

    attention_workers: int = 1
    """Processes that compute everything but the routed experts, each with its own KV cache."""
    expert_servers: int = 0
    """Processes that hold the routed experts; 0: each attention worker computes them itself."""
    redundant_experts: int = 0
    """Expert copies of each layer beyond one of each."""
    min_replicas: int = 1
    """Servers that hold each expert, at least; with 2 no request waits when a server dies."""
    placement: str | None = None
    """File that says which server holds which experts; None: the same number each, by measured load later."""
    rebalance_interval: float = 60.0
    """Seconds between two looks at the experts' load, after which some move where that is worth it; 0: never.
    A placement from a file stays what it is."""
    autoscale: str | None = None
    """MIN:MAX expert servers, added and removed by how busy they are; None: only by hand."""
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
    def group(self) -> GroupConfig:
        """Of each attention worker."""
        size, shared = self.tensor_parallel_size, self.expert_tensor_parallel_size
        placement = self.placement if size > 1 else None
        return GroupConfig(size, shared, self.moe_collectives, self.shuffle_align, placement)

    def __post_init__(self) -> None:
        if self.data_parallel_size is None and self.enable_expert_parallel:
            raise ConfigError("--enable-expert-parallel: give the number of ranks as --data-parallel-size")
        if self.data_parallel_size is not None:
            self._set_ranks(self.data_parallel_size)
        _at_least("--attention-workers", self.attention_workers, 1)
        _at_least("--expert-servers", self.expert_servers, 0)
        _at_least("--redundant-experts", self.redundant_experts, 0)
        _at_least("--min-replicas", self.min_replicas, 1)
        if not 0 <= self.rebalance_interval < math.inf:
            raise ConfigError.field("--rebalance-interval", self.rebalance_interval, "seconds, 0 or more")
        _one_of("--transport", self.transport, get_args(Transport))
        if self.transport == "shm" and self.cluster_address is not None:
            raise ConfigError.field("--transport", "shm", "auto, socket with --cluster-address")
        if (self.cluster_address is None) != (self.cluster_secret_file is None):
            raise ConfigError("--cluster-address and --cluster-secret-file: give both or none")
        self._check_group()
        if self.dispatch is not None:
            _one_of("--dispatch", self.dispatch, get_args(DispatchName))
            if not self.apart:
                raise ConfigError.field("--attention-workers", 1, "at least 2 with --dispatch")
        if self.expert_servers == 0:
            names = ["redundant_experts", "min_replicas", "autoscale", "transport", "cluster_address"]
            for name in names if self.tensor_parallel_size > 1 else ["placement", *names]:
                if getattr(self, name) != getattr(ClusterConfig, name):
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError.field("--expert-servers", 0, f"at least 1 with {flag}")
        elif self.min_replicas > self.expert_servers:
            raise ConfigError.field(
                "--min-replicas", self.min_replicas, f"at most --expert-servers, {self.expert_servers}"
            )

    def _check_group(self) -> None:
        size, shared = self.tensor_parallel_size, self.expert_tensor_parallel_size
        _at_least("--tensor-parallel-size", size, 1)
        if shared < 1 or size % shared:
            divisors = ", ".join(str(one) for one in range(1, size + 1) if size % one == 0)
            raise ConfigError.field(
                "--expert-tensor-parallel-size", shared, f"{divisors}, what divides {size}"
            )
        if self.moe_collectives is not None:
            _one_of("--moe-collectives", self.moe_collectives, get_args(Form))
            if size == 1:
                raise ConfigError.field("--tensor-parallel-size", 1, "at least 2 with --moe-collectives")
        _one_of("--shuffle-align", self.shuffle_align, get_args(Align))
        if size > 1 and self.expert_servers > 0:
            raise ConfigError.field("--expert-servers", self.expert_servers, "0 with --tensor-parallel-size")

    def _set_ranks(self, ranks: int) -> None:
        """The number of processes follows from the number of ranks."""
        _at_least("--data-parallel-size", ranks, 1)
        servers = ranks if self.enable_expert_parallel else self.expert_servers
        for name, value in (("attention_workers", ranks), ("expert_servers", servers)):
            given = getattr(self, name)
            if given not in (value, getattr(ClusterConfig, name)):
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(flag, given, f"{value} with --data-parallel-size {ranks}")
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class ExpertServerConfig:
    """All that an expert server's process needs to know."""

    model: str
    """A directory."""
    layout: ExpertLayout
    address: str
    """Where to listen: unix:PATH or tcp:HOST:PORT (0: any free port)."""
    kernels: KernelName = "auto"
    device: str = "cpu"
    threads: int = 1
    cpus: tuple[int, ...] = ()
    """Cores that this process is kept on; none: any."""
    schedule: Schedule = "lockstep"
    queue_policy: QueuePolicyName = "defrag"
    trace: str | None = None
    """File for its part of a trace; None: nothing is written down."""

    def to_json(self) -> str:
        """For the command line of its process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExpertServerConfig:
        """The inverse of `to_json`."""
        parts = json.loads(text)
        layout = parts.pop("layout")
        prefixes = {int(layer): prefix for layer, prefix in layout.pop("prefixes").items()}
        return cls(layout=ExpertLayout(prefixes=prefixes, **layout), **parts)


@dataclass(frozen=True)
class TraceConfig:
    """What is written down of a run."""

    trace: str | None = None
    """File for a trace of all processes, a row each: steps, layers, batch sizes, waits. It is there when the
    run has ended and opens at https://ui.perfetto.dev."""


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side of `moesaic serve`."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    api_key: str | None = None
    """Clients must send this key as `Authorization: Bearer KEY`. Better set MOESAIC_API_KEY: other users
    of this machine can read a command line."""
    served_model_name: str | None = None
    """Name in the API; None: MODEL as given."""
    chat_template: str | None = None
    """File with a Jinja chat template to use in place of the checkpoint's own."""
    max_queue: int = 256
    """Requests that may wait beyond max_num_seqs; more are answered 429."""
    access_log: bool = False
    """Write a line for each HTTP request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError.field("--port", self.port, "0 to 65535")
        _at_least("--max-queue", self.max_queue, 0)
        if self.api_key is not None:
            _check_key("--api-key", self.api_key)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError.field("--served-model-name", self.served_model_name, "a name that is not empty")


def resolve_server(config: ServerConfig, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """`config` with what it leaves open taken from the environment."""
    return replace(config, api_key=config.api_key or api_key(environment))


def api_key(environment: Mapping[str, str] | None = None) -> str | None:
    """The key that a server asks for and a client sends, where no flag says it; empty counts as none."""
    key = (os.environ if environment is None else environment).get("MOESAIC_API_KEY") or None
    if key is not None:
        _check_key("MOESAIC_API_KEY", key)
    return key


def hub_cache(environment: Mapping[str, str] | None = None) -> Path:
    """Where the Hugging Face hub's library keeps what it downloads, by that library's own variables."""
    known = os.environ if environment is None else environment
    if "HF_HUB_CACHE" in known:
        return Path(known["HF_HUB_CACHE"]).expanduser()
    cache = Path(known.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(known.get("HF_HOME", cache)).expanduser() / "hub"


def worker_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a worker process.

    OpenMP threads sleep while they wait unless the user decided otherwise: its spinning default costs
    a scheduler quantum at every operator as soon as another process wants the core.
    """
    known = os.environ if environment is None else environment
    return {"OMP_WAIT_POLICY": "passive", **known}


def _check_key(name: str, key: str) -> None:
    """A key that a header can carry. The error does not repeat it."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{name}: this key cannot be sent; allowed: ASCII characters, no spaces, not empty")


def _at_least(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or value < low:  # from Python anything may come
        raise ConfigError.field(name, value, f"an integer of at least {low}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError.field(name, value, ", ".join(allowed))
