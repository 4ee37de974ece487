"""Connects the ranks of a group as --collectives-backend says."""

from __future__ import annotations

from torch import distributed

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.experts.collectives.group import Group
from moesaic.kernels import table
from moesaic.runtime.group.rows import HostRows, RowCollectives
from moesaic.runtime.group.tensor_rows import DeviceRows
from moesaic.runtime.group.torch_peers import TorchPeers
from moesaic.runtime.model_loading import count_gpus, select_device

FLAG = "--collectives-backend"


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


def connect(config: WorkerConfig, group: Group) -> RowCollectives:
    """The collectives of this rank, which own the group. All ranks call it.

    Raises ConnectionLost if they cannot connect.
    """
    backend = config.parallel.collectives_backend
    if backend == "host":
        return HostRows(group)
    device = select_device(config.model)
    return DeviceRows(
        group, TorchPeers(backend, group, device), table.pick(str(device), config.model.kernels)
    )
