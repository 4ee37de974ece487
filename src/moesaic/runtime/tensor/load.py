"""From settings to one rank of a group: its heads, its experts, its KV blocks, the form that joins them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from moesaic.collectives.group import Group
from moesaic.config import GroupConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.core.tables import Tables
from moesaic.core.tokens import IntArray
from moesaic.kernels import table
from moesaic.kvcache.paged import PagedKV
from moesaic.models import files, registry
from moesaic.models.checkpoint import Progress
from moesaic.models.shard import Shard
from moesaic.runtime.loaded import Loaded, device_of, kv_type, load_model
from moesaic.runtime.tensor.counted import Counted
from moesaic.runtime.tensor.experts import GroupExperts, cut
from moesaic.runtime.tensor.forecast import Forecast
from moesaic.runtime.tensor.forms import AllReduce, DeepSpeed, Form, Scattered
from moesaic.runtime.tensor.sharded import Sharded


def check(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that a group cannot carry out, or a model that cannot be dealt out."""
    scheduler, size = config.scheduler, config.group.size
    for flag, value, allowed in (
        ("--schedule", scheduler.schedule, "lockstep"),
        ("--inflight-batches", scheduler.inflight_batches, 1),
        ("--combine", scheduler.combine, "exact"),
        ("--trace", config.trace, None),
        ("--record-routing", config.record, None),
    ):
        if value != allowed:
            allowed_text = "nothing" if allowed is None else str(allowed)
            raise ConfigError.field(flag, value, f"{allowed_text} with --tensor-parallel-size {size}")
    path = files.resolve(config.model.model, config.model.revision)
    registry.read_spec(path, Shard(0, size))
    units = size // config.group.expert_ranks
    spec = registry.read_spec(path)
    if units > spec.num_experts:
        raise ConfigError.field(
            "--tensor-parallel-size", size, f"ranks with an expert each, {spec.num_experts}"
        )
    if config.group.expert_ranks > spec.expert_width:
        width = f"at most the experts' width, {spec.expert_width}"
        raise ConfigError.field("--expert-tensor-parallel-size", config.group.expert_ranks, width)


def load_rank(config: WorkerConfig, group: Group, progress: Progress | None = None) -> Loaded:
    """This rank's heads, and the experts that the placement gives it."""
    path = files.resolve(config.model.model, config.model.revision)
    device = device_of(config.model)
    if device.type != "cpu":
        raise ConfigError.field("--device", device.type, "cpu with --tensor-parallel-size")
    kernels = table.pick("cpu", config.model.kernels)
    layout = registry.expert_layout(path, kernels, "cpu", config.model.dtype)
    shard = Shard(group.rank, group.size)
    loaded = load_model(config.model, progress, layout, config.most_threads, shard)
    unit, part = divmod(group.rank, config.group.expert_ranks)
    owners = owners_of(config.group, layout)
    wanted = {layer: np.flatnonzero(owners[layer] == unit).tolist() for layer in layout.layers}
    weights = registry.load_experts(path, kernels, wanted, "cpu", config.model.dtype)
    if config.group.expert_ranks > 1:
        weights = {layer: cut(one, part, config.group.expert_ranks) for layer, one in weights.items()}
    return replace(loaded, model=replace(loaded.model, experts=weights))


def join(config: WorkerConfig, group: Group, loaded: Loaded, num_blocks: int) -> Sharded:
    """The parts of a loaded rank, put together. All ranks have as many KV blocks."""
    model, chosen = loaded.model, config.group
    path = files.resolve(config.model.model, config.model.revision)
    layout = registry.expert_layout(path, loaded.kernels, "cpu", config.model.dtype)
    owners = {layer: one * chosen.expert_ranks for layer, one in owners_of(chosen, layout).items()}
    counted = Counted()
    experts = GroupExperts(group, loaded.kernels, model.experts, owners, counted, chosen.expert_ranks)
    size, dtype = config.cache.block_size, kv_type(config.cache, loaded)
    kv = PagedKV(model.spec.kv, model.spec.num_layers, num_blocks, size, dtype, loaded.device, loaded.kernels)
    return Sharded(model, kv, size, group, form_of(chosen, group, experts, counted), counted)


def follower(config: WorkerConfig, group: Group) -> Sharded:
    """A rank but the first, which says how many KV blocks there are."""
    loaded = load_rank(config, group)
    num_blocks = int.from_bytes(group.announce(b""), "little")
    return join(config, group, loaded, num_blocks)


def owners_of(config: GroupConfig, layout: ExpertLayout) -> Mapping[int, IntArray]:
    """Layer -> [E] the unit that holds each expert: a rank, or the ranks that share one. Of copies that which
    the tables expect, or the first.

    Raises ConfigError for a placement that does not fit.
    """
    units = config.size // config.expert_ranks
    if config.placement is None:
        return equal_owners(layout.layers, layout.num_experts, units)
    placement = Placement.read(config.placement, units)
    placement.check(layout.fingerprint, layout.layers, layout.num_experts)
    tables = Tables.beside(config.placement, units)
    if tables is not None:
        return dict(zip(tables.layers, tables.experts.astype(np.int64), strict=True))
    return {layer: placement.table(layer)[:, 0] for layer in layout.layers}


def equal_owners(layers: tuple[int, ...], num_experts: int, units: int) -> Mapping[int, IntArray]:
    """Consecutive ranges, which differ by at most one expert.

    Example: 5 experts in 2 units: 0, 0, 0, 1, 1.
    """
    counts = [len(each) for each in np.array_split(np.arange(num_experts), units)]
    return dict.fromkeys(layers, np.repeat(np.arange(units), counts))


def form_of(config: GroupConfig, group: Group, experts: GroupExperts, counted: Counted) -> Form:
    """The one that --moe-collectives names. Raises ConfigError for `shuffled` without tables."""
    match config.form:
        case "deepspeed":
            return DeepSpeed(group, experts)
        case "all-reduce":
            return AllReduce(group, experts)
        case "reduce-scatter":
            return Scattered(group, experts, Forecast(group, counted))
    units = config.size // config.expert_ranks
    tables = None if config.placement is None else Tables.beside(config.placement, units)
    if config.form == "shuffled" and tables is None:
        raise ConfigError.field("--placement", config.placement, "a file with tables, for shuffled rows")
    return Scattered(group, experts, Forecast(group, counted, tables, config.align, config.expert_ranks))
