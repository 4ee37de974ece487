"""Equal bits on several hosts: which instruction set the processes of a cluster compute with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining import enlisting
from moesaic.cluster.member import Member
from moesaic.config.values import KernelName


def in_use(members: Iterable[Member]) -> KernelName | None:
    """The instruction set of the native kernels of these members; None: other kernels, or none serves yet."""
    name = next((one.kernels for one in members if one.in_service), "")
    kind, _, rest = name.partition(" (")  # such as "native (avx512), paced"
    return cast("KernelName", rest.partition(")")[0]) if kind == "native" else None


def of_this_host(wanted: KernelName) -> KernelName | None:
    """The instruction set with which a process of this host will compute. wanted: of --kernels.

    None: with other kernels.
    """
    sets = enlisting.instruction_sets()
    found = sets[0] if wanted == "auto" and sets else wanted
    return cast("KernelName", found) if found in sets else None


def unlike(process: RemoteProcess, used: KernelName | None) -> str | None:
    """Why a process that joined would compute other bits than members with this set; None if it would not.

    A process that names its kernels itself says no instruction sets, and may differ.
    """
    theirs = process.instruction_sets
    if used is None or used in theirs or not theirs:
        return None
    return (
        f"--kernels: this cluster computes with {used}, which the CPU of {process.host} lacks; "
        f"start the cluster with --kernels {theirs[0]} for equal bits, or join with --kernels"
    )
