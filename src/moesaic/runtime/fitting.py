"""Decides before weights are read whether a model fits into memory, and how long its requests may be.

Question: Does a model fit into the memory of this machine, and what happens if it does not?
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moesaic.config import ClusterConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.models.checkpoint import Claims
from moesaic.models.headers import Headers
from moesaic.models.rope import RopeConfig
from moesaic.models.shard import Shard
from moesaic.models.spec import ModelSpec
from moesaic.runtime.cache_size import AUTO_SHARE, bytes_of_request, count_tokens, parse_cache_memory
from moesaic.runtime.drafting import uses_mtp
from moesaic.runtime.machine import available_memory
from moesaic.runtime.model_loading import context_length, read_expert_layout, select_device
from moesaic.runtime.quick_fit import resolve_processes, surely_fits

SHORTEST = 512
"""Tokens of the shortest maximum length that is chosen. A model with room for less does not fit."""
API_BYTES, WORKER_BYTES = 200 << 20, 400 << 20
"""Bytes of libraries and tables in the process of the API and in each other process, beside weights, cache
and rows. Together they are the 600 MiB that docs/offloading.md tells users to leave for one worker."""
LOGIT_COPIES = 4
"""Copies of the logits of all requests of a step, in float32, that sampling makes."""
CACHES_SHARE = 0.2
"""Share of the memory beside attention weights that KV caches get where experts do not fit. Experts have the
rest."""
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes in the memory of a host."""

    attention: int
    """Bytes of all weights but the routed experts, in all attention workers."""
    experts: int
    """Bytes of all routed experts."""
    private: int
    """Bytes of the weights that are copied or converted, and so do not stay in the mapped files."""
    working: int
    """Bytes of libraries and of the rows of a step, in all processes."""

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.attention + self.experts


@dataclass(frozen=True)
class Fit:
    """The settings with which a model fits."""

    config: WorkerConfig
    streamed_bytes: int | None = None
    """Bytes that `--fast-memory` may be, for each expert server if there are some. None: all experts are in
    memory."""
    notice: str = ""
    """Says in one line what differs from the settings. Empty: nothing does."""


def fit(config: WorkerConfig, cluster: ClusterConfig | None = None) -> Fit:
    """The settings with which a model fits into the memory that is available now.

    Where the model fits with its cache, they are `config` itself. Where only its longest request does not
    fit, the cache takes what is left, and requests get a lower maximum length. Where the weights do not fit,
    `streamed_bytes` says what may be in memory. On a GPU, and where other hosts have processes, nothing is
    decided.

    cluster: the processes; None: one worker. Raises ConfigError where a given length does not fit.
    """
    if cluster is not None:
        config = replace(config, parallel=cluster.resolve().parallel)
    cluster = resolve_processes(config, cluster)
    has_other_hosts = cluster.is_remote or config.parallel.nnodes > 1 or cluster.cluster_address is not None
    if has_other_hosts or config.offload is not None or surely_fits(config, cluster):
        return Fit(config)
    if select_device(config.model).type == "cuda":
        return Fit(config)
    spec = registry.read_spec(
        files.resolve(*config.model.source),
        Shard(0, config.parallel.tensor_parallel_size),
    )
    return _Fitting(config, cluster, spec, measure_need(config, cluster, spec), available_memory()).decide()


def measure_need(config: WorkerConfig, cluster: ClusterConfig, spec: ModelSpec) -> MemoryNeed:
    """What a model takes beside its cache. Only headers of the files are read."""
    path = files.resolve(*config.model.source)
    kernels = table.pick("cpu", config.model.kernels)
    claims = registry.claim_outside_experts(path, kernels, config.model.dtype)
    layout = read_expert_layout(config.model) if spec.moe_layers else None
    experts = 0 if layout is None else layout.num_bytes
    if uses_mtp(config) and experts:
        experts += experts // len(spec.moe_layers)
    private_attention, private_experts = claims.bytes, experts
    if config.model.mmap and registry.is_quantised(files.read_config(path)):
        private_attention -= claims.mapped_bytes
        private_experts = 0 if layout is None or _maps_experts(path, layout) else experts
    elif config.model.mmap and _is_mapped(path, kernels, config.model.dtype):
        private_attention = private_experts = 0
    workers = cluster.attention_workers + cluster.prefill_workers
    attention = claims.bytes + (workers - 1) * private_attention
    processes = workers * cluster.tensor_parallel_size + cluster.expert_servers
    row = 2 * spec.top_k * (spec.hidden_size + spec.expert_width) + 8 * spec.hidden_size
    rows = 4 * config.scheduler.max_num_batched_tokens * row
    logits = LOGIT_COPIES * 4 * config.scheduler.max_num_seqs * spec.vocab_size
    return MemoryNeed(
        attention,
        experts,
        private=workers * private_attention + private_experts,
        working=API_BYTES + processes * WORKER_BYTES + workers * (rows + logits),
    )


def measure_bytes(config: WorkerConfig, cluster: ClusterConfig) -> int:
    """Bytes that a model takes on this host, with the cache that its settings name. On a GPU they are 0.

    A cache that is chosen by itself takes what is left, so it does not count. Raises MoesaicError for a model
    that cannot be loaded.
    """
    config, cluster = replace(config, parallel=cluster.resolve().parallel), cluster.resolve()
    if select_device(config.model).type == "cuda":
        return 0
    shard = Shard(0, config.parallel.tensor_parallel_size)
    spec = registry.read_spec(files.resolve(*config.model.source), shard)
    need = measure_need(config, cluster, spec)
    workers = cluster.attention_workers + cluster.prefill_workers
    is_given = config.cache.kv_cache_memory != "auto"
    caches = parse_cache_memory(config, torch.device("cpu")) * workers if is_given else 0
    return need.weights + need.working + caches


def _maps_experts(path: Path, layout: ExpertLayout) -> bool:
    """Whether the kernels read quantised experts in the mapped files."""
    headers = Headers(path)
    return all(headers.is_stored(layout, layer) for layer in layout.layers)


def _is_mapped(path: Path, kernels: table.Kernels, dtype: str) -> bool:
    """Whether the kernels read weights that are not quantised in the type that the files have."""
    raw = files.read_config(path)
    stored_type = registry.stored_type(raw, path, Claims(path))
    type_in_memory = registry.type_in_memory(stored_type, "cpu", kernels) if dtype == "auto" else dtype
    return type_in_memory == stored_type


@dataclass(frozen=True)
class _Fitting:
    """Compares what a model needs with what is available."""

    config: WorkerConfig
    cluster: ClusterConfig
    spec: ModelSpec
    """The spec has the heads of one rank."""
    need: MemoryNeed
    available: int

    def decide(self) -> Fit:
        longest, left = context_length(self.config.model), self.available - self.need.weights
        left -= self.need.working
        left -= self._rotary_bytes(min(longest, self._tokens(self._share(left))))
        share = self._share(left)
        if self._tokens(share) < min(SHORTEST, longest):
            return self._stream(longest)
        if self.config.cache.kv_cache_memory != "auto":
            return self._shorten(self.config, longest, self._share(self._given_caches()))
        one_request = self._bytes(longest)
        # `compute_cache_size` takes this. Mapped weights count as available there.
        automatic = int(AUTO_SHARE * (self.available - self.need.private)) // self._ranks
        if one_request <= automatic <= share:
            return Fit(self.config)
        # AUTO_SHARE leaves memory to other programs, which matters less than a request that is served.
        budget = max(int(AUTO_SHARE * share), min(share, one_request))
        budget = min(budget, self._most_bytes(longest))
        return self._shorten(self._with_cache(budget), longest, budget)

    @property
    def _ranks(self) -> int:
        return self.config.parallel.tensor_parallel_size

    @property
    def _number_type(self) -> str:
        dtype = self.config.cache.kv_cache_dtype
        return "float32" if dtype == "auto" else dtype

    @property
    def _workers(self) -> int:
        return self.cluster.attention_workers + self.cluster.prefill_workers

    def _length_of_short_factors(self) -> int:
        """The longest maximum length with which rotary position embedding has its short factors; 0: any."""
        path = files.resolve(*self.config.model.source)
        rope = getattr(registry.model_file(path)[1], "rope", None)
        return rope.original if isinstance(rope, RopeConfig) and rope.long_factors else 0

    def _rotary_bytes(self, tokens: int) -> int:
        """Bytes of the tables of rotary position embedding, a cosine and a sine for each pair of numbers."""
        return 4 * self.spec.kv.key_width * tokens * self._workers * self._ranks

    def _share(self, num_bytes: int) -> int:
        """The part of the caches of all workers that one rank has."""
        return num_bytes // self._workers // self._ranks

    def _given_caches(self) -> int:
        """Bytes of the caches of all workers by --kv-cache-memory."""
        return parse_cache_memory(self.config, torch.device("cpu")) * self._workers

    def _most_bytes(self, longest: int) -> int:
        """Bytes of a rank's cache that can be used: by as many requests of the maximum length as may run."""
        return self._bytes(longest) * self.config.scheduler.max_num_seqs

    def _tokens(self, num_bytes: int, number_type: str | None = None) -> int:
        """Tokens of the longest request that a rank's cache of so many bytes holds."""
        dtype = registry.CACHE_DTYPES[number_type or self._number_type]
        return count_tokens(self.config, self.spec, dtype, num_bytes)

    def _bytes(self, tokens: int) -> int:
        """Bytes of a rank's cache for one request of so many tokens."""
        dtype = registry.CACHE_DTYPES[self._number_type]
        return bytes_of_request(self.config, self.spec, dtype, tokens)

    def _with_cache(self, num_bytes: int) -> WorkerConfig:
        """The settings with a cache of so many bytes in each rank."""
        cache = replace(self.config.cache, kv_cache_memory=str(num_bytes * self._ranks))
        return replace(self.config, cache=cache)

    def _shorten(self, config: WorkerConfig, longest: int, budget: int) -> Fit:
        """The settings with a maximum length that fits into a rank's cache of `budget` bytes.

        Raises ConfigError if a given length does not fit, or so few tokens that nobody can mean them.
        """
        tokens = self._tokens(budget)
        if tokens >= longest:
            return Fit(config)
        size = in_gib(budget * self._ranks)
        room = f"a {self._number_type} KV cache of {size} beside {in_gib(self.need.weights)} of weights"
        if self._number_type == "float32":
            room += f" ({self._tokens(budget, 'bfloat16')} with --kv-cache-dtype bfloat16)"
        if self.config.model.max_model_len is not None:
            choices = f"at most {tokens}, for which there is room in {room}"
            raise ConfigError.field("--max-model-len", longest, choices)
        if tokens < SHORTEST:
            least = in_gib(self._bytes(SHORTEST) * self._ranks)
            raise ConfigError.field("--kv-cache-memory", config.cache.kv_cache_memory, f"at least {least}")
        limit = f"requests have at most {tokens} of the model's {longest} tokens"
        if tokens <= self._length_of_short_factors() < longest:
            # With longrope other factors apply to short contexts. Free memory must not decide about answers.
            raise ConfigError(
                f"--max-model-len: {limit}, for which there is room in {room}; allowed: a given one"
            )
        notice = f"{limit}, for which there is room in {room}"
        return Fit(replace(config, model=replace(config.model, max_model_len=tokens)), notice=notice)

    def _stream(self, longest: int) -> Fit:
        """The settings where experts do not fit. Raises ConfigError where the rest does not fit either."""
        need_text = f"{in_gib(self.need.weights + self.need.working)} with rows and libraries"
        problem = f"the model takes {need_text}, and {in_gib(self.available)} of memory are available"
        room = self.available - self.need.attention - self.need.working
        is_given = self.config.cache.kv_cache_memory != "auto"
        caches = self._given_caches() if is_given else int(CACHES_SHARE * room)
        budget = self._share(caches)
        if not self.need.experts or caches >= room or self._tokens(budget) < min(SHORTEST, longest):
            raise ConfigError(f"model: {problem}; allowed: a smaller model, or more memory")
        if not self.cluster.expert_servers:
            return Fit(self.config, self.available - API_BYTES - WORKER_BYTES, notice=problem)
        budget = budget if is_given else min(budget, self._most_bytes(longest))
        shorter_fit = self._shorten(self.config if is_given else self._with_cache(budget), longest, budget)
        notice = "; ".join(filter(None, (problem, shorter_fit.notice)))
        return Fit(shorter_fit.config, (room - caches) // self.cluster.expert_servers, notice)


def in_gib(num_bytes: float) -> str:
    """A size as flags take it. Example: "17.3GiB"."""
    return f"{num_bytes / GIB:.1f}GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f}MiB"
