"""The kernels that Triton compiles, as one implementation of every operation."""

from __future__ import annotations

from dataclasses import fields

from moesaic.gpu.exchange.exchange_launches import GraphKernels
from moesaic.gpu.triton import exchange, nvshmem_exchange
from moesaic.gpu.triton.graphs import GraphRecorder
from moesaic.gpu.triton.launching import IS_INTERPRETED
from moesaic.gpu.triton.operations import OPERATIONS
from moesaic.kernels.table import Kernels


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
