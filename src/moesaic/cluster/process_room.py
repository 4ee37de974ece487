"""Measures what bounds the number of a cluster's processes on this host: see `policy.fleet.bounds`."""

from __future__ import annotations

import resource
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from moesaic.cluster.autoscaling import autoscale_rules
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.core.placement import count_copies
from moesaic.policy.fleet.autoscale import ROLES as AUTOSCALED_ROLES
from moesaic.policy.fleet.bounds import (
    FIRST_PROCESS_FILES,
    LEAST_BYTES,
    ROLES,
    Counts,
    Room,
    find_excess,
)
from moesaic.runtime.machine import available_memory

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def measure_room(
    cluster: ClusterConfig, num_experts: int | None, is_remote: bool, worker_pids: Collection[int] = ()
) -> Room:
    """The room for processes of this cluster now.

    num_experts: experts of a layer; None: that is not known. is_remote: whether other hosts have all
    processes. worker_pids: attention workers of this host. A further one takes as much memory as the smallest
    of them.
    """
    copies = (
        None
        if num_experts is None
        else count_copies(num_experts, cluster.redundant_experts, cluster.min_replicas)
    )
    worker_bytes = min(map(_measure_private_bytes, worker_pids), default=0)
    process_bytes = {name: max(least, worker_bytes) for name, least in LEAST_BYTES.items()}
    process_bytes["expert_servers"] = LEAST_BYTES["expert_servers"]  # the experts of the others move to it
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the start raises the limit to this one
    bounds_files = FIRST_PROCESS_FILES <= files != resource.RLIM_INFINITY  # the start refuses a lower limit
    listens = cluster.cluster_address is not None and not is_remote
    return Room(
        copies,
        None if is_remote else available_memory(),
        process_bytes,
        files if bounds_files else None,
        count_ports() if listens else None,
        dict.fromkeys(("attention_workers", "prefill_workers"), cluster.ranks_per_node),
    )


def count_ports() -> int | None:
    """Number of TCP ports that the system gives to programs that name none. None: that is not known."""
    try:
        first, last = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return None
    return last - first + 1


def check_flags(cluster: ClusterConfig, num_experts: int | None) -> None:
    """Raises ConfigError for numbers of processes, or limits of --autoscale, that are out of bounds."""
    cluster = cluster.resolve()
    room = measure_room(cluster, num_experts, cluster.is_remote)
    counts = {name: getattr(cluster, name) for name in ROLES}
    # A file of --placement says what each server holds, so there may be as many servers as it names.
    excess = find_excess(counts, {}, room if cluster.placement is None else replace(room, expert_copies=None))
    if excess is not None:
        raise ConfigError.field(_flag_of(cluster, excess.role), excess.count, excess.bound.describe())
    for role, rule in autoscale_rules(cluster).items():
        limits: Counts = counts | dict.fromkeys(AUTOSCALED_ROLES[role], rule.maximum)
        excess = find_excess(limits, {}, room)
        if excess is not None:
            allowed_values = f"for {role} a MAX of {excess.bound.describe()}"
            raise ConfigError.field("--autoscale", cluster.autoscale, allowed_values)


def _flag_of(cluster: ClusterConfig, role: str) -> str:
    """The flag that sets the number of processes of a role."""
    if cluster.data_parallel_size is not None and (
        role == "attention_workers" or (role == "expert_servers" and cluster.enable_expert_parallel)
    ):
        return "--data-parallel-size"
    return "--" + role.replace("_", "-")


def _measure_private_bytes(pid: int) -> int:
    """Bytes of memory that only this process has. 0: that is not known."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
