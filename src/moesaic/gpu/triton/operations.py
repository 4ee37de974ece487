"""The kernels that Triton compiles, as one implementation of every operation.

Operations without a Triton kernel are the torch reference's.

Question: Which kernels run on a GPU with `--kernels triton`?
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from moesaic.gpu.exchange.exchange_launches import GraphKernels
from moesaic.gpu.triton import (
    attention,
    cache,
    collectives,
    convolution,
    delta,
    dense,
    exchange,
    experts,
    gate,
    nvshmem_exchange,
    rows,
)
from moesaic.gpu.triton.graphs import GraphRecorder
from moesaic.gpu.triton.launching import IS_INTERPRETED
from moesaic.kernels.table import Kernels

OPERATIONS: dict[str, Any] = {
    "embed": dense.embed,
    "linear": dense.linear,
    "linears": dense.linears,
    "rms_norm": rows.rms_norm,
    "add_norm": rows.add_norm,
    "rope": rows.rope,
    "store": cache.store,
    "paged_attention": attention.paged_attention,
    "gated_mlp": dense.gated_mlp,
    "gate": gate.gate,
    "experts": experts.experts,
    "merge": rows.merge,
    "sigmoid_gate": dense.sigmoid_gate,
    "convolve": convolution.convolve,
    "delta": delta.delta,
    "gated_norm": rows.gated_norm,
    "sigmoid_times": rows.sigmoid_times,
    "permute_rows": collectives.permute_rows,
    "restore_rows": collectives.restore_rows,
    "sum_ranks": collectives.sum_ranks,
}
"""Maps names of fields of `kernels.table.Kernels` to operations."""


def triton_kernels(kind: str, reference: Kernels) -> GraphKernels | None:
    """The kernels for a kind of device. None: a CPU outside of Triton's interpreter cannot run them.

    reference: has the operations that Triton has not.
    """
    if kind == "cpu" and not IS_INTERPRETED:
        return None
    operations = {field.name: getattr(reference, field.name) for field in fields(reference)}
    operations |= {"name": "triton", "can_use_quantized": True, "can_skip_absent": True, **OPERATIONS}
    operations["recorder"] = GraphRecorder if kind == "cuda" else None
    if exchange.IS_SUPPORTED:
        operations |= {"exchange": exchange, "nvshmem_exchange": nvshmem_exchange}
    return GraphKernels(**operations)
