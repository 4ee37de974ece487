"""Equal bits on several hosts: which instruction set the processes of a cluster compute with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining import enlisting
from moesaic.cluster.member import Member
from moesaic.config.values import KernelName


def find_set_in_use(members: Iterable[Member]) -> KernelName | None:
    """The instruction set of the native kernels of these members; None: other kernels, or none serves yet."""
    name = next((member.kernels for member in members if member.in_service), "")
    kind, _, suffix = name.partition(" (")  # such as "native (avx512), paced"
    return cast("KernelName", suffix.partition(")")[0]) if kind == "native" else None


def choose_local_set(kernels: KernelName) -> KernelName | None:
    """The instruction set with which a process of this host will compute. kernels: of --kernels.

    None: with other kernels.
    """
    sets = enlisting.instruction_sets()
    kernel_name = sets[0] if kernels == "auto" and sets else kernels
    return cast("KernelName", kernel_name) if kernel_name in sets else None


def explain_difference(process: RemoteProcess, cluster_set: KernelName | None) -> str | None:
    """Why a process that joined would compute other bits than members with this set; None if it would not.

    A process that names its kernels itself says no instruction sets, and may differ.
    """
    process_sets = process.instruction_sets
    if cluster_set is None or cluster_set in process_sets or not process_sets:
        return None
    return (
        f"--kernels: this cluster computes with {cluster_set}, which the CPU of {process.host} lacks; "
        f"start the cluster with --kernels {process_sets[0]} for equal bits, or join with --kernels"
    )
