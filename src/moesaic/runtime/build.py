"""Builds a worker from its settings: loads the model, sizes the KV cache, joins the parts.

Question: Where is a worker put together?
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import ReceivesKV
from moesaic.core.weight_types import is_packed
from moesaic.core.worker_info import WorkerInfo
from moesaic.experts.client import NoServers
from moesaic.kernels.matrix import kind_of
from moesaic.kernels.table import BY_NAME, instruction_sets, list_rounding_sets, torch_code
from moesaic.models import files, fingerprint
from moesaic.models.kvcache.memory import HybridMemory
from moesaic.models.kvcache.paged_kv import PagedKV, bytes_per_token
from moesaic.models.kvcache.states import state_bytes
from moesaic.runtime import in_memory, offloaded_worker, out_of_memory
from moesaic.runtime.cache_size import check_memory
from moesaic.runtime.context import WorkerContext, WorkerParts
from moesaic.runtime.executor import Executor
from moesaic.runtime.group import build_rank
from moesaic.runtime.group.shared_images import GroupMemory
from moesaic.runtime.prefix_cache.build import build_prefixes
from moesaic.runtime.transfer.pieces import Transfers
from moesaic.runtime.transfer.receiving import KVReceiver
from moesaic.runtime.transfer.sending import EARLY_BYTES, PIECE_BYTES, KVSender
from moesaic.runtime.worker import Worker
from moesaic.text.structured import vocabulary
from moesaic.text.structured.constraints import Constraints


def build_worker(context: WorkerContext) -> tuple[Worker, WorkerInfo]:
    """Load the model and build the worker at the other end of the context's connection.

    Raises ConfigError or CheckpointError, one line each, when something does not fit.
    """
    path = files.resolve(*context.config.model.source)
    stamp = context.config.checkpoint_stamp or fingerprint.stamp(path)
    context = replace(context, config=replace(context.config, checkpoint_stamp=stamp))
    with out_of_memory.explain(context.config), fingerprint.guard_unchanged(path, stamp):
        if not context.kept_model.num_loads:  # else the last worker's cache would count as used
            check_memory(context.config, context.limits.max_model_len)
        parts = _build_parts(context)
        constraints = Constraints(
            lambda: vocabulary.read(path),
            parts.loaded_model.model.spec.vocab_size,
            parts.loaded_model.kernels.mask_tokens,
        )
        return _assemble(context, parts, constraints), _describe(context, parts)


def _build_parts(context: WorkerContext) -> WorkerParts:
    if context.config.parallel.tensor_parallel_size > 1:
        return build_rank.build_parts(context)
    if context.config.offload is not None:
        return offloaded_worker.build_parts(context, context.config.offload)
    return in_memory.build_parts(context)


def _transfers(context: WorkerContext, parts: WorkerParts) -> Transfers:
    """What the worker does with the KV of other workers."""
    config, connection, memory = context.config, context.connection, parts.images or parts.memory
    if config.kv_role is None:
        return Transfers()
    assert isinstance(memory, PagedKV | HybridMemory | GroupMemory), "refused with what has another memory"
    if config.kv_role == "prefill":
        # On a GPU each copy waits for what was launched before it, so pieces that leave early are
        # larger.
        early_bytes = EARLY_BYTES if parts.loaded_model.device.type == "cpu" else PIECE_BYTES
        return KVSender(
            memory, config.cache.block_size, connection.send, config.transport, min_early_bytes=early_bytes
        )
    one_sided = config.transport == "nixl"
    receiver = KVReceiver(memory, config.cache.block_size, connection.send, config.remote_address, one_sided)
    try:
        connection.send(ReceivesKV(receiver.endpoint, receiver.secret))
    except ConnectionLost:
        receiver.close()
        raise
    return receiver


def _assemble(context: WorkerContext, parts: WorkerParts, constraints: Constraints) -> Worker:
    servers = NoServers() if parts.servers is None else parts.servers
    transfers = _transfers(context, parts)
    on_read = None if context.wakeup is None else context.wakeup.ring
    prefixes = build_prefixes(context.config, parts, context.limits.max_model_len, on_read)
    executor = Executor(
        parts.loaded_model.model,
        parts.runner,
        parts.loaded_model.device,
        context.connection,
        servers,
        layerwise=parts.layerwise,
        recorder=parts.recorder,
        routes=parts.routes,
        logit_rows=parts.logit_rows,
        observer=parts.observer,
        memory=parts.memory,
        constraints=constraints,
        predictor=parts.predictor,
        transfers=transfers,
        prefixes=prefixes,
        divide=parts.divide,
    )
    return Worker(
        context.connection,
        parts.scheduler,
        executor,
        context.clock,
        journal=context.journal,
        servers=servers,
        expert_stats=parts.expert_stats,
        wakeup=context.wakeup,
        linger=parts.linger,
        observer=parts.observer,
        transfers=transfers,
        prefixes=prefixes,
    )


def _describe(context: WorkerContext, parts: WorkerParts) -> WorkerInfo:
    loaded_model, expert_layout, block_size = (
        parts.loaded_model,
        parts.expert_layout,
        context.config.cache.block_size,
    )
    spec, model = loaded_model.model.spec, loaded_model.model
    size, (page, seat) = parts.size, state_bytes(spec.states, len(spec.state_layers))
    token_bytes = bytes_per_token(spec.kv, spec.kv_layers, parts.kv_dtype)
    packed_type = _find_packed_type(parts)
    return WorkerInfo(
        model_type=spec.model_type,
        device=_device_name(loaded_model.device),
        kernels=loaded_model.kernels.name,
        dtype=kind_of(model.head) + (f", experts {packed_type}" if packed_type else ""),
        threads=loaded_model.threads,
        num_parameters=model.num_parameters + (expert_layout.parameters if expert_layout else 0),
        weight_bytes=model.num_bytes + (expert_layout.num_bytes if expert_layout else 0),
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        vocab_size=spec.vocab_size,
        max_model_len=context.limits.max_model_len,
        block_size=block_size,
        num_blocks=size.num_blocks,
        kv_bytes=token_bytes * block_size * size.num_blocks * parts.ranks,
        kv_dtype=str(parts.kv_dtype).removeprefix("torch."),
        max_num_seqs=context.limits.max_num_seqs,
        state_bytes=(page * (1 + size.seats + size.snapshots) + seat * size.seats) * parts.ranks,
        state_seats=size.seats,
        state_snapshots=size.snapshots,
        max_num_batched_tokens=context.limits.max_num_batched_tokens,
        ranks=parts.ranks,
        collectives=parts.collectives,
        torch_code=torch_code() if loaded_model.device.type == "cpu" else "",
        speculation=parts.speculation.describe(),
        least_rows=parts.least_rows,
        rounding_kernels=_list_rounding_kernels(parts, packed_type),
        routed_layers=() if parts.routes is None else parts.routes.layers,
    )


def _list_rounding_kernels(parts: WorkerParts, packed_type: str) -> tuple[str, ...]:
    """The kernels that would round rows, where those that were chosen do not."""
    loaded_model = parts.loaded_model
    name = loaded_model.kernels.name.removeprefix("native (").removesuffix(")")
    if name not in instruction_sets() or name in BY_NAME:
        return ()
    return list_rounding_sets([packed_type or kind_of(loaded_model.model.head)])


def _find_packed_type(parts: WorkerParts) -> str:
    """The type of the experts if they are packed. Else empty."""
    packed_kinds = (
        weights.packed_dtype
        for weights in parts.loaded_model.model.experts.values()
        if weights.packed_numbers
    )
    kind = next(packed_kinds, "") if parts.expert_layout is None else parts.expert_layout.dtype
    return kind if kind and is_packed(kind) else ""


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
