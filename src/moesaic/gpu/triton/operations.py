"""The operations that have a Triton kernel. The others are the torch reference's.

Question: Which kernels run on a GPU with `--kernels triton`?
"""

from __future__ import annotations

from typing import Any

from moesaic.gpu.triton import attention, cache, collectives, convolution, delta, dense, experts, gate, rows

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
