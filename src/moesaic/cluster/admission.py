"""Which processes a cluster lets join: their roles, messages, and instruction sets that give equal bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joining import enlisting
from moesaic.cluster.member import Member, Role
from moesaic.config import WorkerConfig
from moesaic.config.values import KernelName
from moesaic.core import messages

FROM_SERVER = (
    messages.Holds,
    messages.Digests,
    messages.ServerReport,
    messages.Failed,
    messages.LinkTest,  # an answer that came too late
)
"""The messages that an expert server may send."""
FROM_RANKS = (messages.RanksWait, messages.Failed, messages.LinkTest)
"""The messages that the ranks of another host may send."""
FROM = {Role.SERVER: FROM_SERVER, Role.RANKS: FROM_RANKS}
"""Workers may send any message."""
TO_ROUTER = (
    messages.Tokens,
    messages.Admitted,
    messages.PromptLogprobs,
    messages.Stats,
    messages.KVReceived,
    messages.KVSent,
    messages.KVNotSent,
)
"""The messages of a worker that requests wait for."""


def why_not(role: Role, worker: WorkerConfig, prefill: bool) -> str | None:
    """Why no process of this role can join a cluster with these workers; None if one can.

    prefill: whether it was started with prefill workers.
    """
    flag, nodes = f"--role {role.flag}", worker.parallel.nnodes
    if role is Role.RANKS:
        return None if nodes > 1 else f"{flag}: the cluster was started without --nnodes"
    if role is Role.SERVER:
        started = "the cluster was started without --expert-servers"
        return None if worker.remote_experts else f"{flag}: {started}"
    if role is Role.PREFILL and not prefill:
        return f"{flag}: the cluster was started without --prefill-workers"
    if worker.record is not None:
        return f"{flag}: the cluster records routing, which workers of other hosts do not"
    if nodes > 1:
        return f"{flag}: each worker of this cluster has ranks on {nodes} hosts; join with --role ranks"
    return None


def instruction_set_in_use(members: Iterable[Member]) -> KernelName | None:
    """The instruction set of the native kernels of these members; None: other kernels, or none serves yet."""
    name = next((one.kernels for one in members if one.in_service), "")
    kind, _, rest = name.partition(" (")  # such as "native (avx512), paced"
    return cast("KernelName", rest.partition(")")[0]) if kind == "native" else None


def instruction_set_of_this_host(wanted: KernelName) -> KernelName | None:
    """The instruction set with which a process of this host will compute. wanted: of --kernels.

    None: with other kernels.
    """
    sets = enlisting.instruction_sets()
    found = sets[0] if wanted == "auto" and sets else wanted
    return cast("KernelName", found) if found in sets else None


def why_unlike_bits(process: RemoteProcess, used: KernelName | None) -> str | None:
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
