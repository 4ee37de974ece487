"""Builds one rank of a group from its settings: its heads, experts, KV blocks and collective layout."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import distributed

from moesaic.config import ParallelConfig, WorkerConfig
from moesaic.core import gpu_parts
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.messages import RanksMeet
from moesaic.core.offload import Offload
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.collectives.group import Group
from moesaic.kernels import table
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import files, fingerprint, registry
from moesaic.models.checkpoint import Progress
from moesaic.models.kvcache.memory import CacheSize, HybridMemory, LayerMemory, layer_memory
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.models.served_files import watch_files
from moesaic.models.shard import Shard
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.runtime import in_memory, memory_levels, offloaded_worker, out_of_memory
from moesaic.runtime.cache_size import compute_cache_size, free_memory, make_block_pool
from moesaic.runtime.context import WorkerContext, WorkerParts
from moesaic.runtime.drafting import add_room_for_drafts, make_prompt_rows, make_speculation, uses_mtp
from moesaic.runtime.group import offloaded_group, shared_attention
from moesaic.runtime.group.collective_layouts import (
    AllReduce,
    CollectiveLayout,
    DeepSpeed,
    ReduceScatter,
    ShuffledReduceScatter,
)
from moesaic.runtime.group.experts import GroupCounts, GroupExperts
from moesaic.runtime.group.forecast import ExpectedRanks
from moesaic.runtime.group.launcher import RankLauncher, rank_config
from moesaic.runtime.group.owners import ExpertOwners, check_placement, read_owners
from moesaic.runtime.group.rows import HostRows, RowCollectives
from moesaic.runtime.group.sharded_model import GroupPredictor, RankRunner, ShardedModel
from moesaic.runtime.group.shared_attention import AttentionRank, SharedAttention
from moesaic.runtime.group.shared_images import GroupMemory
from moesaic.runtime.group.shared_prefixes import GroupPart
from moesaic.runtime.group.tensor_rows import DeviceRows
from moesaic.runtime.group.torch_peers import TorchPeers
from moesaic.runtime.model_loading import (
    LoadedModel,
    check_gpu_sharing,
    choose_kv_dtype,
    context_length,
    count_gpus,
    load_model,
    maps_files,
    read_expert_layout,
    select_device,
)
from moesaic.runtime.prefix_cache.build import compute_root
from moesaic.runtime.prefix_cache.part import OwnPart
from moesaic.trace.parts import trace_path

_CACHE_SIZE = struct.Struct("<3q")
"""A CacheSize, which the first rank announces."""
FLAG = "--collectives-backend"


def check(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that a group cannot carry out, or a model that it cannot divide."""
    scheduler, size = config.scheduler, config.parallel.tensor_parallel_size
    path = files.resolve(*config.model.source)
    registry.read_spec(path, Shard(0, size))
    check_backend(config)
    if config.remote_experts:
        check_gpu_sharing(config)
        return
    for flag, value, allowed_value in (
        ("--schedule", scheduler.schedule, "lockstep"),
        ("--inflight-batches", scheduler.inflight_batches, 1),
        ("--combine", scheduler.combine, "exact"),
        ("--trace", trace_path(config.trace), None),
        ("--record-routing", trace_path(config.record), None),
    ):
        if value != allowed_value:
            allowed_text = "nothing" if allowed_value is None else str(allowed_value)
            condition = "" if config.offload is not None else " without --expert-servers"
            raise ConfigError.field(
                flag, value, f"{allowed_text} with --tensor-parallel-size {size}{condition}"
            )
    _check_experts(config, path)


def _check_experts(config: WorkerConfig, path: Path) -> None:
    """Raises ConfigError where the ranks of a group cannot divide the model's experts."""
    size = config.parallel.tensor_parallel_size
    units = config.parallel.expert_parallel_size
    spec = registry.read_spec(path)
    if units > spec.num_experts:
        raise ConfigError.field(
            "--tensor-parallel-size", size, f"ranks with an expert each, {spec.num_experts}"
        )
    if config.parallel.expert_tensor_parallel_size > spec.expert_width:
        width = f"at most the experts' width, {spec.expert_width}"
        raise ConfigError.field(
            "--expert-tensor-parallel-size", config.parallel.expert_tensor_parallel_size, width
        )
    if config.offload is not None:
        offloaded_group.check(config, config.offload)
    else:
        check_gpu_sharing(config)


def load_rank(
    config: WorkerConfig, group: Group, owners: ExpertOwners | None, progress: Progress | None = None
) -> LoadedModel:
    """Load this rank's heads and, where the whole model is in its memory, its experts.

    owners: None where the experts are on servers.
    """
    drafts, shard = uses_mtp(config), Shard(group.rank, group.size)
    layout = read_expert_layout(config.model, drafts)
    own_memory = offloaded_worker.is_over_disk(config)
    threads = config.most_threads
    loaded_model = load_model(config.model, progress, layout, threads, shard, own_memory, drafts)
    loaded_model = add_room_for_drafts(loaded_model, config)
    if config.offload is not None or owners is None:
        return loaded_model
    path = files.resolve(*config.model.source)
    unit, part = divmod(group.rank, config.parallel.expert_tensor_parallel_size)
    use_mmap, dtype = config.model.mmap, config.model.dtype
    expert_shard, device = Shard(part, config.parallel.expert_tensor_parallel_size), str(loaded_model.device)
    weights = registry.load_experts(
        path, loaded_model.kernels, owners.list_experts(unit), device, dtype, use_mmap, expert_shard
    )
    return replace(loaded_model, model=replace(loaded_model.model, experts=weights))


def join(
    config: WorkerConfig,
    rows: RowCollectives,
    owners: ExpertOwners,
    loaded_model: LoadedModel,
    size: CacheSize,
) -> RankRunner:
    """Build the runner of a loaded rank. size: the same on all ranks."""
    if config.offload is not None:
        return _build_paged_runner(config, config.offload, rows, owners, loaded_model, size)
    model, counts = loaded_model.model, GroupCounts()
    block_size, dtype, device = (
        config.cache.block_size,
        choose_kv_dtype(config.cache, loaded_model),
        loaded_model.device,
    )
    memory = layer_memory(model.spec, size, block_size, dtype, device, loaded_model.kernels)
    collectives = _collectives(
        config.parallel, rows, owners, loaded_model.kernels, model.expert_weights, counts
    )
    sharded_model = ShardedModel(model, memory, device, block_size, rows, collectives)
    name, steps = (
        _describe_layout(config.parallel, owners),
        _steps(config, sharded_model, loaded_model.kernels),
    )
    return RankRunner(steps.run, rows, memory, name, counts, predict=steps.predict)


class RankSteps(Protocol):
    """Computes the steps of a rank."""

    def run(self, batch: TokenBatch) -> torch.Tensor:
        """Run a step on this rank's share of the model. Returns hidden states as `RunBatch` does."""
        ...

    def predict(self, batch: TokenBatch, rows: IntArray) -> torch.Tensor:
        """Run the layer that drafts tokens. Returns hidden states as `RunPrediction` does."""
        ...


def _steps(config: WorkerConfig, sharded_model: ShardedModel, kernels: Kernels) -> RankSteps:
    """Records decode steps on a GPU, unless --enforce-eager is given or the kernels cannot."""
    make_recorder = kernels.recorder
    on_gpu = sharded_model.device.type == "cuda"
    if not on_gpu or config.model.enforce_eager or make_recorder is None:
        return sharded_model
    table_width = -(-context_length(config.model) // sharded_model.block_size)
    return gpu_parts.recorded_rank()(sharded_model, make_recorder(), table_width)


def _build_paged_runner(
    config: WorkerConfig,
    offload: Offload,
    rows: RowCollectives,
    owners: ExpertOwners,
    loaded_model: LoadedModel,
    size: CacheSize,
) -> RankRunner:
    """The runner of a rank whose experts are loaded from the slow level."""
    offloaded_worker.check_states(config, offload, loaded_model.model.spec)
    caches = memory_levels.build_caches(config, offload, loaded_model, size)
    counts, kernels = GroupCounts(), loaded_model.kernels
    levels = memory_levels.build_levels(
        config, offload, loaded_model, read_expert_layout(config.model), owners.list_experts(rows.group.rank)
    )
    weights = offloaded_group.PassWeights(levels.experts)
    collectives = partial(_collectives, config.parallel, rows, owners, kernels, weights, counts)
    post_attention = offloaded_group.GroupPostAttention(loaded_model.model, rows, collectives, weights)
    parts = offloaded_worker.PassParts(loaded_model, levels, post_attention, owners.max_experts, caches)
    passes = offloaded_worker.build_passes(config, offload, parts)
    return RankRunner(
        passes.run,
        rows,
        caches.memory(loaded_model.model.spec),
        _describe_layout(config.parallel, owners),
        counts,
        passes.stats,
    )


def build_parts(context: WorkerContext) -> WorkerParts:
    """On the first rank: start the other ranks' processes and build the parts of the group's worker."""
    limits, config = context.limits, context.config
    check(config)
    if config.remote_experts:
        return _with_servers(context)
    owners = read_owners(config)
    # The launcher gets the cores of the whole worker, and divides them among the ranks.
    launcher = RankLauncher(config)
    config = rank_config(config, 0)
    with launcher.starting():
        group = launcher.gather(context.connection.send)
        check_placement(config, group, owners)
        rows = connect_rows(config, group)
        loaded_model = load_rank(config, group, owners, context.progress)
        kv_dtype = choose_kv_dtype(config.cache, loaded_model)
        free = gather_least_free_memory(config, group, loaded_model)
        size = compute_cache_size(config, loaded_model, limits.max_model_len, kv_dtype, free)
        group.announce(_CACHE_SIZE.pack(*astuple(size)))
        runner = join(config, rows, owners, loaded_model, size)
        group.announce(b"")  # every rank has its memory now
    runner.launcher = launcher
    if context.on_rank_lost is not None:
        launcher.watch_ranks(context.on_rank_lost)
    offload = config.offload
    padded_tokens = None if offload is None else offload.padded_prompt_len
    root = compute_root(config, loaded_model, kv_dtype, owners.digest)
    blocks = make_block_pool(config.cache, size, padded_tokens, root)
    speculation = make_speculation(config, loaded_model.model)
    prompt_rows = make_prompt_rows(config, loaded_model.model)
    return WorkerParts(
        loaded_model,
        kv_dtype,
        size,
        runner,
        LockstepScheduler(limits, blocks, speculation=speculation, prompt_rows=prompt_rows),
        runner.memory,
        images=_images(config, runner.memory, group, launcher),
        stored_root=root,
        share_prefixes=partial(GroupPart, group, launcher.explain_loss),
        expert_stats=runner.stats,
        logit_rows=None if offload is None else offload.logit_rows,
        linger=0.0 if offload is None else offloaded_worker.LINGER,
        ranks=group.size,
        collectives=runner.collectives,
        speculation=speculation,
        predictor=GroupPredictor(runner) if uses_mtp(config) else None,
    )


def _with_servers(context: WorkerContext) -> WorkerParts:
    """On the first rank, with the experts on servers: start the other ranks, which share its attention."""
    layout = in_memory.announce_layout(context)
    launcher = RankLauncher(context.config)
    config = rank_config(context.config, 0)
    with launcher.starting():
        group = launcher.gather(context.connection.send)
        rows = connect_rows(config, group)
        loaded_model = load_rank(config, group, None, context.progress)
        free = gather_least_free_memory(config, group, loaded_model)
        size = compute_cache_size(
            config,
            loaded_model,
            context.limits.max_model_len,
            choose_kv_dtype(config.cache, loaded_model),
            free,
        )
        group.announce(_CACHE_SIZE.pack(*astuple(size)))
        empty_rows = torch.empty(0, loaded_model.model.spec.hidden_size, device=loaded_model.device)
        shared_attention_heads = SharedAttention(rows, launcher.explain_loss, empty_rows)
        parts = in_memory.with_servers(
            replace(context, config=config), layout, loaded_model, size, shared_attention_heads
        )
        group.announce(b"")  # every rank has its memory now
    if context.on_rank_lost is not None:
        launcher.watch_ranks(context.on_rank_lost)
    expert_stats = parts.expert_stats
    return replace(
        parts,
        images=_images(config, parts.memory, group, launcher),
        share_prefixes=partial(GroupPart, group, launcher.explain_loss),
        expert_stats=lambda: replace(expert_stats(), group=shared_attention_heads.stats()),
        ranks=group.size,
        collectives=shared_attention.NAME,
    )


def _images(
    config: WorkerConfig, memory: LayerMemory, group: Group, launcher: RankLauncher
) -> GroupMemory | None:
    """The memory of all ranks, if KV is sent from it or to it."""
    if config.kv_role is None:
        return None
    assert isinstance(memory, PagedKV | HybridMemory), "refused with what has another memory"
    return GroupMemory(group, memory, launcher.explain_loss)


class Follower(Protocol):
    """A rank that computes what the first rank tells it."""

    memory: LayerMemory
    """What its layers keep of sequences."""

    def follow(self, prefixes: OwnPart | None = None) -> None:
        """Compute until the first rank is gone. Raises ConnectionLost then.

        prefixes: the rank's part of those on a disk. None: none are stored.
        """
        ...


def build_follower(config: WorkerConfig, group: Group) -> Follower:
    """On any other rank: build what computes. The first rank announces the number of KV blocks.

    Returns when all ranks are ready.
    """
    path = files.resolve(*config.model.source)
    with out_of_memory.explain(config), fingerprint.guard_unchanged(path, config.checkpoint_stamp):
        owners = None if config.remote_experts else read_owners(config)
        if owners is not None:
            check_placement(config, group, owners)
        rows = connect_rows(config, group)
        loaded_model = load_rank(config, group, owners)
        gather_least_free_memory(config, group, loaded_model)
        size = CacheSize(*_CACHE_SIZE.unpack(group.announce(b"")))
        if owners is None:
            runner: Follower = _attention_rank(config, rows, loaded_model, size)
        else:
            runner = join(config, rows, owners, loaded_model, size)
        group.announce(b"")
        return runner


def _attention_rank(
    config: WorkerConfig, rows: RowCollectives, loaded_model: LoadedModel, size: CacheSize
) -> AttentionRank:
    block_size, dtype, device = (
        config.cache.block_size,
        choose_kv_dtype(config.cache, loaded_model),
        loaded_model.device,
    )
    model, make_recorder = loaded_model.model, loaded_model.kernels.recorder
    memory = layer_memory(model.spec, size, block_size, dtype, device, loaded_model.kernels)
    recordings = None
    if device.type == "cuda" and not config.model.enforce_eager and make_recorder is not None:
        width = -(-context_length(config.model) // block_size)
        attention_recordings = gpu_parts.attention_recordings()
        recordings = attention_recordings(model, memory, device, block_size, rows, make_recorder(), width)
    return AttentionRank(model, memory, device, block_size, rows, recordings)


def gather_least_free_memory(config: WorkerConfig, group: Group, loaded_model: LoadedModel) -> int | None:
    """The free bytes of the rank that has the least, rounded down to MiB. Every rank calls it after loading.

    Returns None where --kv-cache-memory is a size.
    """
    if config.cache.kv_cache_memory != "auto":
        return None
    # In MiB, because notes are int32 numbers.
    own_mebibytes = np.array([free_memory(loaded_model.device) >> 20])
    return int(group.gather_notes(own_mebibytes, np.arange(group.size)).min()) << 20


def _describe_layout(parallel: ParallelConfig, owners: ExpertOwners) -> str:
    """The name of the collective layout and the placement's unused copies, for display."""
    name = parallel.moe_collectives or ("reduce-scatter" if owners.tables is None else "shuffled")
    left_out = f", without the placement's {owners.left_out} copies" if owners.left_out else ""
    return f"{name} ({parallel.shuffle_align}){left_out}" if name == "shuffled" else name + left_out


def _collectives(
    parallel: ParallelConfig,
    rows: RowCollectives,
    owners: ExpertOwners,
    kernels: Kernels,
    weights: Callable[[int], ExpertWeights],
    counts: GroupCounts,
) -> CollectiveLayout:
    """The collective layout that --moe-collectives names."""
    ranks = parallel.expert_tensor_parallel_size
    first_ranks = {layer: units * ranks for layer, units in owners.owners.items()}
    experts = GroupExperts(rows, kernels, weights, first_ranks, counts, ranks)
    if parallel.moe_collectives == "deepspeed":
        return DeepSpeed(rows, experts)
    if parallel.moe_collectives == "all-reduce":
        return AllReduce(rows, experts)
    if parallel.moe_collectives == "reduce-scatter" or owners.tables is None:
        return ReduceScatter(rows, experts)
    return ShuffledReduceScatter(
        rows, experts, ExpectedRanks(rows.group, counts, owners.tables, parallel.shuffle_align, ranks)
    )


def check_backend(config: WorkerConfig) -> None:
    """Raises ConfigError where --collectives-backend does not fit the devices of the ranks."""
    backend, ranks = config.parallel.collectives_backend, config.parallel.tensor_parallel_size
    if backend == "host":
        return
    device, gpus = select_device(config.model).type, count_gpus(config.model)
    allowed_value = ""
    if config.offload is not None:
        allowed_value = "host with --fast-memory"
    elif backend == "gloo" and device != "cpu":
        allowed_value = f"host, nccl with --device {device}"
    elif backend == "nccl" and device != "cuda":
        allowed_value = f"host, gloo with --device {device}"
    elif backend == "nccl" and gpus < ranks:
        allowed_value = f"host: {ranks} ranks need a GPU each, and torch sees {gpus}"
    elif backend == "nccl" and not distributed.is_nccl_available():
        allowed_value = "host: this torch has no NCCL"
    if allowed_value:
        raise ConfigError.field(FLAG, backend, allowed_value)


def connect_rows(config: WorkerConfig, group: Group) -> RowCollectives:
    """The collectives of this rank as --collectives-backend says, which own the group. All ranks call it.

    Raises ConnectionLost if they cannot connect.
    """
    backend = config.parallel.collectives_backend
    if backend == "host":
        return HostRows(group)
    device = select_device(config.model)
    return DeviceRows(
        group, TorchPeers(backend, group, device), table.pick(str(device), config.model.kernels)
    )


def follow(config: WorkerConfig, meeting: RanksMeet, on_rank_lost: Callable[[str], None]) -> None:
    """Compute with the ranks of this host, which is not the one of rank 0, until the group ends.

    config: of the worker, for this host. meeting: with the number of this host. on_rank_lost: called from a
    thread if another rank of this host ends, or if a file that it computes from is written to.

    Raises ConnectionLost at the end of the group, and ConfigError or CheckpointError, one line each, for what
    the user has to change.
    """
    launcher = RankLauncher(config, meeting)
    try:
        with launcher.starting():
            group = launcher.gather()
            ranks = build_follower(rank_config(config, group.rank), group)
        launcher.watch_ranks(on_rank_lost)
        path, is_mapped = files.resolve(*config.model.source), maps_files(config.model)
        with watch_files(path, config.checkpoint_stamp, on_rank_lost) if is_mapped else nullcontext():
            ranks.follow()
    except ConnectionLost as error:
        raise launcher.explain_loss(error) from None
    except torch.OutOfMemoryError as error:
        raise ConfigError(out_of_memory.describe_step_error(error)) from error
    finally:
        launcher.close()
