"""The settings of an attention worker: model, KV cache, batching, queues and offloading.

Question: Where is a flag defined, and how is one added?
"""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, asdict, dataclass
from typing import get_args

from moesaic.config.cluster import ParallelConfig
from moesaic.config.values import (
    CacheDtype,
    Combine,
    CudagraphMode,
    Device,
    Dtype,
    HostTransport,
    KernelName,
    KVRole,
    LogLevel,
    MemoryDivision,
    OffloadSchedule,
    QueuePolicyName,
    RelayUse,
    Schedule,
    at_least,
    check_threads,
    parse_bytes,
    require_one_of,
)
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.core.speculation import SpeculativeConfig


@dataclass(frozen=True)
class ModelConfig:
    """Which model is computed, and how."""

    model: str
    """A Hugging Face directory, a GGUF file, a hub id, a GGUF file on a hub such as `org/name:Q4_K_M`, or
    `demo`, the checkpoint inside the package."""
    _: KW_ONLY
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: str | None = None
    """Changes of config.json, as JSON: `{"key": null}` drops a key that moesaic refuses and that changes no
    answer, other values replace, and objects such as text_config are merged. The log names each change. None:
    config.json as it is."""
    device: Device = "auto"
    """Device that computes. auto takes CUDA if there is a GPU; expert servers take it only when cuda is
    given."""
    dtype: Dtype = "auto"
    """Dtype that the weights are stored in. auto: the checkpoint's own, on a CPU float32 in place of float16.
    A CPU computes in float32."""
    max_model_len: int | None = None
    """Maximum number of tokens of one request, prompt and answer together. None: the checkpoint's own limit,
    or on a CPU what the cache has room for."""
    threads: int | None = None
    """Compute threads of each process: attention worker, rank or expert server. None: the processes share the
    cores; a model of less than 256 MiB gets one thread."""
    pin_threads: bool = False
    """Keep each compute thread on a core of its own."""
    enforce_eager: bool = False
    """Run every step operation by operation. Without it decode steps are recorded once and replayed."""
    cudagraph_mode: CudagraphMode = "piecewise"
    """How a worker on a GPU records decode steps whose experts are on servers. piecewise: a CUDA graph ends
    at each layer's experts. full: one graph is the whole step, and its kernels ask the servers; it needs
    --transport cuda_ipc or nvshmem, --kernels triton, lockstep, one batch in flight and a GPU for each
    process."""
    mmap: bool = True
    """Compute from the mapped checkpoint files, whose memory the processes of a host share. --no-mmap copies
    the weights into huge pages of each process, which a CPU reads faster. Expert servers always map; with
    --fast-memory everything is copied."""
    kernels: KernelName = "auto"
    """Kernels for a CPU: the native ones of one instruction set, or the torch reference. auto takes the
    fastest that this CPU runs in float32. avx512_bf16 and amx_bf16 round the activations that meet bf16
    weights, or a bf16 KV cache, to bf16: they are faster, and answers may differ. So do avx512_int8,
    amx_int8, avx2_vnni_int8 and avx2_int8, which round the activations that meet weights in integers to int8.
    amx_bf16x3 splits the activations that meet bf16 weights into three bf16 numbers, which hold a float32,
    and amx_bf16x2 into two, which hold 16 of its 24 bits."""

    @property
    def source(self) -> tuple[str, str | None, str | None]:
        """What `models.files.resolve` takes to find the model."""
        return self.model, self.revision, self.hf_overrides


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    kv_cache_memory: str = "auto"
    """Size of the KV cache, such as 4GiB. auto: what max_num_seqs requests of the maximum length need, but at
    most 40 % of the memory left after the weights (90 % of a GPU's), or on a CPU what one request needs."""
    kv_cache_dtype: CacheDtype = "auto"
    """Dtype of keys and values in the cache. auto: float32 on a CPU, the dtype of the weights on CUDA. int8
    has a scale for each token and head. It holds nearly four times as many tokens as float32, and answers may
    differ."""
    block_size: int = 16
    """Tokens in one KV block."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of finished requests and reuse them for equal prefixes."""
    prefix_cache_dir: str | None = None
    """Directory that keeps the KV blocks of finished requests over restarts, so that an equal prefix is read
    from the disk and not computed. It holds what users wrote, in files that only this user can read. None: no
    block goes to a disk."""
    prefix_cache_disk: str = "20GiB"
    """Maximum size of all files in --prefix-cache-dir. The least recently used ones are removed."""

    @property
    def prefix_cache_bytes(self) -> int:
        """The bytes of --prefix-cache-disk. Raises ConfigError for what is no size."""
        return parse_bytes("--prefix-cache-disk", self.prefix_cache_disk)

    def __post_init__(self) -> None:
        if self.prefix_cache_dir is None:
            if self.prefix_cache_disk != CacheConfig.prefix_cache_disk:
                raise ConfigError(
                    "--prefix-cache-disk: needs --prefix-cache-dir, which says where the files are"
                )
            return
        if not self.enable_prefix_caching:
            raise ConfigError.field("--no-enable-prefix-caching", "true", "nothing with --prefix-cache-dir")
        parse_bytes("--prefix-cache-disk", self.prefix_cache_disk)


@dataclass(frozen=True)
class SchedulerConfig:
    """Continuous batching."""

    max_num_seqs: int = 64
    """Maximum number of requests computed in one step."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens, of prompts and answers, computed in one step. Longer prompts are split into
    chunks."""
    prefill_step_ms: float | None = None
    """Aim in milliseconds for a step that computes tokens of a prompt while answers wait for their next
    tokens: chunks of prompts become as small as that takes, but not so small that a token costs much more. A
    step that no answer waits for may take five times as long. 0: chunks are as large as
    --max-num-batched-tokens allows. None: 200 with serve, if all experts are in memory, else 0."""
    schedule: Schedule = "lockstep"
    """How attention workers and expert servers work together. barrier: all workers wait for each other at the
    experts of every layer. lockstep: each worker runs its whole batch through the layers, alone. async: a
    token continues as soon as its own experts have answered (Asynchronous Expert Parallelism). auto: by the
    devices' curves and the load, tokens continue alone or together, and servers wait for all workers or
    not."""
    inflight_batches: int = 1
    """Number of parts of a batch, with --schedule lockstep. 2 splits each batch in two halves: one half
    computes while the other waits for experts."""
    queue_policy: QueuePolicyName = "defrag"
    """The layer whose waiting tokens run next, with --schedule async. defrag: Algorithm 1 of the paper. mtfs:
    most tokens first. flfs: first layer first."""
    combine: Combine = "exact"
    """What expert servers answer. exact: one row for each token and expert, which gives the bits of one
    process. partial: one weighted sum for each token and server, which is fewer bytes and equal up to
    rounding."""
    relay: RelayUse = "auto"
    """Whether a row that several expert servers of another host need is sent to one of them, which passes it
    on. auto: where it pays by the links. always: wherever it saves bytes. off: never."""
    replica_timeout: float | None = None
    """Minimum seconds without progress after which an attention worker asks another expert server that holds
    the experts. None: 10 times the longest round trip of the last 30 to 60 s, from 0.05 to 0.3 s."""
    speculative_config: str | None = None
    """Draft tokens and check several of them in a step, as JSON, such as {"method": "ngram",
    "num_speculative_tokens": 4}. ngram also takes prompt_lookup_max and prompt_lookup_min. mtp drafts 1 token
    with the model's own layer for it. No answer changes. None: one token of a request in a step."""


@dataclass(frozen=True)
class QueueConfig:
    """How long tokens wait in the queues of attention workers and expert servers."""

    queue_urgency: float | None = None
    """Seconds after which the queue whose tokens waited longest runs next, whatever the policy says, with
    --schedule async; 0: never. None: 0.1 on attention workers and never on expert servers, as in the paper's
    public code."""
    queue_history: int = 0
    """Number of past choices whose average queue lengths count in the look-ahead of --queue-policy defrag,
    with --schedule async. 0: only the present lengths count."""
    expert_batch_pairs: int | None = None
    """Minimum number of (token, expert) pairs in a batch of an expert server; 1: it computes whatever is
    there. None: on a CPU it computes whatever is there if calls mostly bring some 6 pairs or more for each of
    its experts; else it waits for more calls, during three batches at most. It never waits once every client
    has asked, nor on a GPU of its own."""
    expert_batch_wait: float = 0.0
    """Milliseconds after which an expert server computes fewer pairs than --expert-batch-pairs; at most
    100."""

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
        """Seconds after which the oldest queue runs next; None: never. default: used without --queue-urgency.

        Example: QueueConfig(queue_urgency=0).urgency(0.1) is None.
        """
        return default if self.queue_urgency is None else self.queue_urgency or None

    def check(self, schedule: Schedule, policy: QueuePolicyName) -> None:
        """Raises ConfigError for a setting that the schedule or the queue policy does not use."""
        if self.queue_history and policy != "defrag":
            raise ConfigError.field("--queue-policy", policy, "defrag with --queue-history")
        for flag, is_given in (
            (f"--queue-policy {policy}", policy != SchedulerConfig.queue_policy),
            ("--queue-urgency", self.queue_urgency is not None),
            ("--queue-history", self.queue_history > 0),
        ):
            if is_given and schedule != "async":
                raise ConfigError.field("--schedule", schedule, f"async with {flag}")
        if schedule == "barrier" and self.expert_batch_pairs is not None:
            choices = "lockstep, async with --expert-batch-pairs: at a barrier servers wait for all workers"
            raise ConfigError.field("--schedule", schedule, choices)


@dataclass(frozen=True)
class OffloadConfig:
    """How a model larger than the memory that it may take is computed."""

    fast_memory: str | None = None
    """Maximum memory for weights, KV cache and activations, such as 2GiB; libraries take about 240 MiB
    besides. Experts that do not fit are read from the disk while others are computed, as planned for the
    requests and the machine (MoE-Lightning). On a GPU it is the GPU's memory (auto: what is free), and the
    experts come from RAM. With expert servers it is what each of them may take for experts. None: the whole
    model is in memory, or on a CPU what fits if it is larger."""
    hardware: str | None = None
    """File of `moesaic hardware measure`, for --fast-memory. None: this machine is measured first."""
    profile: str | None = None
    """File that `moesaic profile` wrote for this model. The plan of --fast-memory then knows how often
    each expert is chosen. None: the plan takes all experts to be equally likely."""
    offload_schedule: OffloadSchedule = "auto"
    """How experts are loaded with --fast-memory: cgopipe loads the next layer's experts in pages; on-demand
    loads only the chosen experts; s4 and serial are baselines. On a GPU also: in-place (the CPU computes the
    experts in RAM), split (GPU and CPU share the chosen experts by price), s2 and s3. auto: the fastest for
    this job."""
    micro_batch_size: int | None = None
    """Number of requests in a micro-batch of --fast-memory. None: as planned."""
    micro_batches: int | None = None
    """Number of micro-batches in a batch of --fast-memory. None: as planned."""
    hot_experts: str = "auto"
    """File that keeps how often each expert was chosen, from one start with --fast-memory to the next; those
    chosen most often stay in memory first. auto: one for each model, in ~/.cache/moesaic/hot-experts. off:
    nothing is read or written."""
    memory_division: MemoryDivision = "follow"
    """How --fast-memory divides memory between experts and KV cache while a server runs on a CPU. follow: by
    the requests that are there, between steps. fixed: as planned for --max-num-seqs requests."""
    pad: bool = False
    """Pad every prompt to the longest one, with --fast-memory, as MoE-Lightning(p) does, to measure what
    padding costs. Padding passes all layers and experts and fills the cache; no answer changes. Logits are
    not padded, nor are answers that end early. No prefix is shared."""

    def __post_init__(self) -> None:
        if self.fast_memory not in (None, "auto"):
            parse_bytes("--fast-memory", self.fast_memory)
        require_one_of("--offload-schedule", self.offload_schedule, get_args(OffloadSchedule))
        require_one_of("--memory-division", self.memory_division, get_args(MemoryDivision))
        if not self.hot_experts:
            raise ConfigError.field("--hot-experts", self.hot_experts, "auto, off or a file")
        for name in vars(self):
            if self.fast_memory is None and getattr(self, name) != getattr(OffloadConfig, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: needs --fast-memory, which says how much the model may take")
        sizes = ("--micro-batch-size", self.micro_batch_size), ("--micro-batches", self.micro_batches)
        for flag, value in sizes:
            if value is not None:
                at_least(flag, value, 1)


SEATS_SHARE = 0.5
"""Share of the cache's memory for the states of running sequences, at most, unless one needs more."""
SNAPSHOTS_SHARE = 0.25
"""Share of the cache's memory for snapshots of states, at most."""
SNAPSHOTS_PER_SEQUENCE = 4
"""At most so many snapshots for each sequence that may run."""


@dataclass(frozen=True)
class WorkerConfig:
    """All settings of a worker process."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    remote_experts: bool = False
    """True: the routed experts are on servers that the supervisor names. False: this worker computes them."""
    expert_servers: int = 1
    """Expert servers with which the cluster begins."""
    attention_workers: int = 1
    """Attention workers with which it begins. Both decide which rows run alone (`minimum_batch`)."""
    supervised: bool = False
    """True: the worker reports to a supervisor that it is alive, also while it has nothing to do."""
    beside: int = 0
    """Number of other processes of this host that may use the same GPUs."""
    own_server: int | None = None
    """Number of the expert server of this worker's own rank, which is asked first. None: there is none."""
    most_threads: int | None = None
    """Maximum number of compute threads: this process's share of the cores. None: all cores. `threads`
    overrides it."""
    cpus: tuple[int, ...] = ()
    """Cores that this process may run on. Empty: any core."""
    devices: tuple[str, ...] = ()
    """GPUs that this process sees, by their names in CUDA_VISIBLE_DEVICES. Empty: those of its parent."""
    transport: HostTransport = "shm"
    """Transport to the expert servers."""
    remote_address: str | None = None
    """tcp:HOST:PORT on which prefill workers of other hosts reach this worker. None: none do."""
    trace: str | None = None
    """Trace file. The starting process names the file of all processes here; each worker gets the name of its
    own part."""
    record: str | None = None
    """File for recorded routing, named in the same way; see `trace.routing`."""
    record_share: float = 1.0
    """Share of the requests whose routing is recorded."""
    offload: Offload | None = None
    """How a model larger than its fast memory is computed. None: the whole model is in memory."""
    server_memory: int | None = None
    """Maximum bytes of experts in the memory of each expert server. None: all its experts are in memory."""
    queues: QueueConfig = QueueConfig()
    paced: str | None = None
    """File of modelled devices (`core.paced_devices`). None: this process takes the time that it takes."""
    log_level: LogLevel = "info"
    kv_role: KVRole | None = None
    """prefill: this worker sends the KV of prompts to others. decode: it receives KV. None: neither."""
    policy_file: str | None = None
    """File of curves (`core.curves`). None: those of the device that computes."""
    checkpoint_stamp: str = ""
    """Stamp of the checkpoint's files (`models.fingerprint`), which must not change before they are loaded.
    Empty: as they are now."""

    def automatic_blocks(self, budget: float, block_bytes: float, longest: int) -> int:
        """Number of cache blocks with --kv-cache-memory auto.

        budget: bytes that the cache may take. longest: maximum tokens of a request.
        """
        per_request = -(-longest // self.cache.block_size)
        return int(min(budget // block_bytes, per_request * self.scheduler.max_num_seqs))

    def state_room(self, budget: float, page: float, seat: float) -> tuple[int, int]:
        """Seats and snapshots of a model with linear attention: at least one seat.

        A plan for a model larger than memory has a seat for each request and no snapshots.
        budget: bytes beside the KV blocks of one request of the maximum length. page, seat: bytes of one.
        """
        max_seqs = self.scheduler.max_num_seqs
        if self.offload is not None:
            return max_seqs, 0
        seats = min(max_seqs, max(1, int(budget * SEATS_SHARE // (page + seat))))
        if not self.cache.enable_prefix_caching:
            return seats, 0
        return seats, min(SNAPSHOTS_PER_SEQUENCE * max_seqs, max(0, int(budget * SNAPSHOTS_SHARE // page)))

    def __post_init__(self) -> None:
        require_one_of("--device", self.model.device, get_args(Device))
        require_one_of("--dtype", self.model.dtype, get_args(Dtype))
        require_one_of("--kernels", self.model.kernels, get_args(KernelName))
        require_one_of("--cudagraph-mode", self.model.cudagraph_mode, get_args(CudagraphMode))
        if self.model.cudagraph_mode == "full":
            self._check_full_graphs()
        require_one_of("--kv-cache-dtype", self.cache.kv_cache_dtype, get_args(CacheDtype))
        if self.scheduler.inflight_batches not in (1, 2):
            raise ConfigError.field("--inflight-batches", self.scheduler.inflight_batches, "1 or 2")
        if self.scheduler.inflight_batches == 2 and self.scheduler.schedule != "lockstep":
            choices = "lockstep with --inflight-batches 2"
            raise ConfigError.field("--schedule", self.scheduler.schedule, choices)
        require_one_of("--schedule", self.scheduler.schedule, get_args(Schedule))
        if self.scheduler.speculative_config is not None:
            self._check_speculation(self.scheduler.speculative_config)
        require_one_of("--combine", self.scheduler.combine, get_args(Combine))
        require_one_of("--relay", self.scheduler.relay, get_args(RelayUse))
        timeout = self.scheduler.replica_timeout
        if timeout is not None and not 0 < timeout < math.inf:
            raise ConfigError.field("--replica-timeout", timeout, "more than 0 seconds")
        require_one_of("--queue-policy", self.scheduler.queue_policy, get_args(QueuePolicyName))
        self.queues.check(self.scheduler.schedule, self.scheduler.queue_policy)
        at_least("--max-num-seqs", self.scheduler.max_num_seqs, 1)
        at_least("--max-num-batched-tokens", self.scheduler.max_num_batched_tokens, 1)
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            rows, seats = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
            raise ConfigError.field("--max-num-batched-tokens", rows, f"at least --max-num-seqs, {seats}")
        if not 0 <= (self.scheduler.prefill_step_ms or 0) < math.inf:
            raise ConfigError.field("--prefill-step-ms", self.scheduler.prefill_step_ms, "0 or more")
        at_least("--block-size", self.cache.block_size, 1)
        if self.model.max_model_len is not None:
            at_least("--max-model-len", self.model.max_model_len, 2)
        check_threads(self.model.threads)
        if self.parallel.placement is not None and self.parallel.tensor_parallel_size == 1:
            raise ConfigError.field("--tensor-parallel-size", 1, "at least 2 with --placement")
        if self.cache.kv_cache_memory != "auto":
            parse_bytes("--kv-cache-memory", self.cache.kv_cache_memory)
        if self.cache.prefix_cache_dir is not None:
            self._check_prefix_cache()

    def _check_prefix_cache(self) -> None:
        """Raises ConfigError for a setting that --prefix-cache-dir does not work with."""
        for flag, value, required_value in (
            ("--device", "cuda" if self.model.device == "cuda" else None, None),
            ("--nnodes", self.parallel.nnodes, 1),
        ):
            if value != required_value:
                requirement = "nothing" if required_value is None else str(required_value)
                raise ConfigError.field(flag, value, f"{requirement} with --prefix-cache-dir")

    def _check_full_graphs(self) -> None:
        """Raises ConfigError for a setting that --cudagraph-mode full does not work with."""
        model, scheduler = self.model, self.scheduler
        for flag, value, required_value in (
            ("--kernels", model.kernels, "triton"),
            ("--enforce-eager", model.enforce_eager, False),
            ("--schedule", scheduler.schedule, "lockstep"),
            ("--inflight-batches", scheduler.inflight_batches, 1),
            ("--combine", scheduler.combine, "exact"),
            ("--tensor-parallel-size", self.parallel.tensor_parallel_size, 1),
            ("--fast-memory", "a size" if self.offload or self.server_memory else None, None),
            ("--paced", self.paced, None),
        ):
            if value != required_value:
                requirement = "nothing" if required_value is None else str(required_value)
                raise ConfigError.field(flag, value, f"{requirement} with --cudagraph-mode full")

    def _check_speculation(self, text: str) -> None:
        """Raises ConfigError for a wrong setting, and for what drafted tokens cannot go with."""
        SpeculativeConfig.parse(text)
        if self.record is not None:
            raise ConfigError.field("--speculative-config", text, "nothing with --record-routing")

    def to_json(self) -> str:
        """The settings as JSON, for the command line of a worker process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """The inverse of `to_json`."""
        parts = json.loads(text)
        model, cache = ModelConfig(**parts.pop("model")), CacheConfig(**parts.pop("cache"))
        scheduler, cpus = SchedulerConfig(**parts.pop("scheduler")), tuple(parts.pop("cpus"))
        parallel, offload = ParallelConfig(**parts.pop("parallel")), parts.pop("offload")
        offload = None if offload is None else Offload.from_json(offload)
        queues = QueueConfig(**parts.pop("queues"))
        parts["devices"] = tuple(parts["devices"])  # JSON has lists only
        return cls(model, cache, scheduler, parallel, cpus=cpus, offload=offload, queues=queues, **parts)
