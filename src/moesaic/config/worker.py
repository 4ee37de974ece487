"""An attention worker: the model, its cache, its batches, and who it shares them with."""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, asdict, dataclass
from typing import get_args

from moesaic.config.cluster import ParallelConfig
from moesaic.config.values import (
    CacheDtype,
    Combine,
    Device,
    Dtype,
    HostTransport,
    KernelName,
    OffloadSchedule,
    QueuePolicyName,
    Schedule,
    at_least,
    check_threads,
    one_of,
    parse_bytes,
)
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is computed."""

    model: str
    """A Hugging Face directory, a hub id, or `demo`, the checkpoint inside the package."""
    _: KW_ONLY
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    device: Device = "auto"
    """Where to compute; auto takes CUDA when there is one, except for expert servers: they take it when asked
    to, with cuda."""
    dtype: Dtype = "auto"
    """Storage of the weights; auto: the checkpoint's own (on a CPU float32 in place of float16). A CPU
    computes in float32."""
    max_model_len: int | None = None
    """Most tokens, prompt and answer together, of one request; None: the checkpoint's own limit."""
    threads: int | None = None
    """Threads that compute, of each process: so many on every attention worker, rank of a group and expert
    server. None: the cores, shared out among them, and just one for a model of less than 256 MiB."""
    pin_threads: bool = False
    """Keep each of these threads on a core of its own."""
    enforce_eager: bool = False
    """Walk every step operation by operation instead of replaying recorded decode steps."""
    mmap: bool = True
    """Compute from the checkpoint's files where they are mapped, in memory that processes of a host share;
    off: from a copy of the process's own in huge pages, which a CPU reads faster. Expert servers always map,
    with --fast-memory all is copied."""
    kernels: KernelName = "auto"
    """Implementation of the arithmetic on a CPU: the native kernels of one instruction set, or the torch
    reference; auto: the fastest that this CPU can run in float32. avx512_bf16 and amx_bf16 round rows that
    meet bf16 weights to bf16 and multiply faster; their answers may differ."""


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    kv_cache_memory: str = "auto"
    """Size of the KV cache, such as 4GiB; auto: what max_num_seqs requests of the maximum length
    need, at most 40 % of the memory left after the weights (of a GPU's 90 %)."""
    kv_cache_dtype: CacheDtype = "auto"
    """Storage of keys and values; auto: float32 on a CPU, the dtype of the weights on CUDA. int8 has a scale
    for each token and head and holds nearly four times as many tokens as float32; its answers may differ."""
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
class QueueConfig:
    """How long rows wait in queues, on attention workers and on expert servers."""

    queue_urgency: float | None = None
    """With --schedule async: seconds after which the queue whose rows waited longest runs next, whatever the
    policy says; 0: never. None: 0.1 on attention workers, never on expert servers, as in the public code."""
    queue_history: int = 0
    """With --schedule async and --queue-policy defrag: in the look ahead a layer also counts for the rows
    that waited there at the last so many choices, on average; 0: only for those of now."""
    expert_batch_pairs: int | None = None
    """(row, expert) pairs with which an expert server begins a run; 1: it begins with whatever is there.
    None: with whatever is there where calls mostly have 6 pairs or more for each expert that it has; else
    its clients wait for each other, for three runs at most. It never waits longer than until each of them has
    asked."""
    expert_batch_wait: float = 0.0
    """With --expert-batch-pairs: milliseconds after which it begins with fewer, at most 100."""

    def __post_init__(self) -> None:
        if self.queue_urgency is not None and not 0 <= self.queue_urgency < math.inf:
            raise ConfigError.field("--queue-urgency", self.queue_urgency, "seconds, 0 or more")
        at_least("--queue-history", self.queue_history, 0)
        if self.expert_batch_pairs is not None:
            at_least("--expert-batch-pairs", self.expert_batch_pairs, 1)
        if not 0 <= self.expert_batch_wait <= 100:
            raise ConfigError.field("--expert-batch-wait", self.expert_batch_wait, "milliseconds, 0 to 100")
        if (self.expert_batch_pairs or 1) > 1 and not self.expert_batch_wait:
            raise ConfigError.field("--expert-batch-wait", 0, "above 0 with --expert-batch-pairs")
        if self.expert_batch_wait and self.expert_batch_pairs in (None, 1):
            raise ConfigError.field(
                "--expert-batch-pairs", self.expert_batch_pairs, "at least 2 with --expert-batch-wait"
            )

    def urgency(self, default: float | None) -> float | None:
        """Seconds, as policies take it; None: never. default: where nothing was said.

        Example: QueueConfig(queue_urgency=0).urgency(0.1) is None.
        """
        return default if self.queue_urgency is None else self.queue_urgency or None

    def check(self, schedule: Schedule, policy: QueuePolicyName) -> None:
        """Raises ConfigError for what does not go with them."""
        if self.queue_history and policy != "defrag":
            raise ConfigError.field("--queue-policy", policy, "defrag with --queue-history")
        for flag, given in (
            (f"--queue-policy {policy}", policy != SchedulerConfig.queue_policy),
            ("--queue-urgency", self.queue_urgency is not None),
            ("--queue-history", self.queue_history > 0),
        ):
            if given and schedule != "async":
                raise ConfigError.field("--schedule", schedule, f"async with {flag}")
        if schedule == "barrier" and self.expert_batch_pairs is not None:
            allowed = "lockstep, async with --expert-batch-pairs: at a barrier servers wait for all workers"
            raise ConfigError.field("--schedule", schedule, allowed)


@dataclass(frozen=True)
class OffloadConfig:
    """A model larger than the memory that it may take."""

    fast_memory: str | None = None
    """Most memory for weights, cache and rows, such as 2GiB; libraries take about 240 MiB beside it. Experts
    that do not fit come from the disk while others are computed, as planned for the job and this machine
    (MoE-Lightning). On a GPU: its own (auto: what is free), over RAM. None: the whole model is in memory."""
    hardware: str | None = None
    """With --fast-memory: file of `moesaic hardware measure`; None: this machine is measured first."""
    profile: str | None = None
    """With --fast-memory: what `moesaic profile` wrote for this model. The plan then knows which experts are
    popular, and how few of them rows choose together; None: it takes all to be equally likely."""
    offload_schedule: OffloadSchedule = "auto"
    """With --fast-memory: cgopipe, the next layer's experts come in pages; on-demand, only those that were
    chosen come; on a GPU also in-place, the CPU computes those in RAM, s2, s3; s4; serial; auto: the best."""
    micro_batch_size: int | None = None
    """With --fast-memory: requests computed together; None: as planned."""
    micro_batches: int | None = None
    """With --fast-memory: of a batch; None: as planned."""
    pad: bool = False
    """With --fast-memory: pad every prompt to the longest one, as MoE-Lightning(p) does, to measure what that
    costs. Padding goes through all layers and experts, fills the cache and is attended to while answers are
    generated; no answer changes. Not padded: logits, answers that end early. No prefix is shared."""

    def __post_init__(self) -> None:
        if self.fast_memory not in (None, "auto"):
            parse_bytes("--fast-memory", self.fast_memory)
        one_of("--offload-schedule", self.offload_schedule, get_args(OffloadSchedule))
        for name in vars(self):
            if self.fast_memory is None and getattr(self, name) != getattr(OffloadConfig, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: needs --fast-memory, which says how much the model may take")
        sizes = ("--micro-batch-size", self.micro_batch_size), ("--micro-batches", self.micro_batches)
        for flag, value in sizes:
            if value is not None:
                at_least(flag, value, 1)


@dataclass(frozen=True)
class WorkerConfig:
    """All that a worker process needs to know."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    remote_experts: bool = False
    """The routed experts are on servers that the supervisor names; else they are computed here."""
    supervised: bool = False
    """A supervisor waits for signs of life, also while there is nothing to do."""
    beside: int = 0
    """Other processes of this host that may load into the same GPUs."""
    own_server: int | None = None
    """The expert server of this worker's own rank, asked first."""
    most_threads: int | None = None
    """Its share of the cores; None: all. `threads`, where it is given, goes before."""
    cpus: tuple[int, ...] = ()
    """Cores that this process is kept on; none: any."""
    transport: HostTransport = "shm"
    """To the expert servers of this host."""
    trace: str | None = None
    """File for a trace: of all processes where this config starts them, in each process for its part."""
    record: str | None = None
    """The same for the experts that rows choose; see `trace.routing`."""
    record_share: float = 1.0
    """Of the requests, how many are in it."""
    offload: Offload | None = None
    """How it runs a model that is larger than its fast memory; None: all of it is in memory."""
    queues: QueueConfig = QueueConfig()

    def __post_init__(self) -> None:
        one_of("--device", self.model.device, get_args(Device))
        one_of("--dtype", self.model.dtype, get_args(Dtype))
        one_of("--kernels", self.model.kernels, get_args(KernelName))
        one_of("--kv-cache-dtype", self.cache.kv_cache_dtype, get_args(CacheDtype))
        if self.scheduler.inflight_batches not in (1, 2):
            raise ConfigError.field("--inflight-batches", self.scheduler.inflight_batches, "1 or 2")
        if self.scheduler.inflight_batches == 2 and self.scheduler.schedule != "lockstep":
            allowed = "lockstep with --inflight-batches 2"
            raise ConfigError.field("--schedule", self.scheduler.schedule, allowed)
        one_of("--schedule", self.scheduler.schedule, get_args(Schedule))
        one_of("--combine", self.scheduler.combine, get_args(Combine))
        one_of("--queue-policy", self.scheduler.queue_policy, get_args(QueuePolicyName))
        self.queues.check(self.scheduler.schedule, self.scheduler.queue_policy)
        at_least("--max-num-seqs", self.scheduler.max_num_seqs, 1)
        at_least("--max-num-batched-tokens", self.scheduler.max_num_batched_tokens, 1)
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            rows, seats = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
            raise ConfigError.field("--max-num-batched-tokens", rows, f"at least --max-num-seqs, {seats}")
        at_least("--block-size", self.cache.block_size, 1)
        if self.model.max_model_len is not None:
            at_least("--max-model-len", self.model.max_model_len, 2)
        check_threads(self.model.threads)
        if self.parallel.placement is not None and self.parallel.tensor_parallel_size == 1:
            raise ConfigError.field("--tensor-parallel-size", 1, "at least 2 with --placement")
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
        parallel, offload = ParallelConfig(**parts.pop("parallel")), parts.pop("offload")
        offload = None if offload is None else Offload(**offload)
        queues = QueueConfig(**parts.pop("queues"))
        return cls(model, cache, scheduler, parallel, cpus=cpus, offload=offload, queues=queues, **parts)
