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

SERVER_MESSAGES = (
    messages.HoldReply,
    messages.Digests,
    messages.ServerReport,
    messages.WorkerFailed,
    messages.LinkTest,  # an answer that came too late
)
"""The messages that an expert server may send."""
RANKS_MESSAGES = (messages.RanksWait, messages.WorkerFailed, messages.LinkTest)
"""The messages that the ranks of another host may send."""
MESSAGES_BY_ROLE = {Role.SERVER: SERVER_MESSAGES, Role.RANKS: RANKS_MESSAGES}
"""Workers may send any message."""
ROUTER_MESSAGES = (
    messages.Tokens,
    messages.RequestsAdmitted,
    messages.PromptLogprobs,
    messages.Stats,
    messages.KVReceived,
    messages.KVSent,
    messages.KVNotSent,
)
"""The messages of a worker that requests wait for."""


def explain_refusal(role: Role, worker: WorkerConfig, prefill: bool) -> str | None:
    """Why no process of this role can join a cluster with these workers; None if one can.

    prefill: whether it was started with prefill workers.
    """
    flag, nodes = f"--role {role.flag}", worker.parallel.nnodes
    if role is Role.RANKS:
        return None if nodes > 1 else f"{flag}: the cluster was started without --nnodes"
    if role is Role.SERVER:
        reason = "the cluster was started without --expert-servers"
        return None if worker.remote_experts else f"{flag}: {reason}"
    if role is Role.PREFILL and not prefill:
        return f"{flag}: the cluster was started without --prefill-workers"
    if worker.record is not None:
        return f"{flag}: the cluster records routing, which workers of other hosts do not"
    if nodes > 1:
        return f"{flag}: each worker of this cluster has ranks on {nodes} hosts; join with --role ranks"
    return None


def find_set_in_use(members: Iterable[Member]) -> KernelName | None:
    """The instruction set of the native kernels of these members; None: other kernels, or none serves yet."""
    name = next((member.kernels for member in members if member.in_service), "")
    kind, _, suffix = name.partition(" (")  # such as "native (avx512), paced"
    return cast("KernelName", suffix.partition(")")[0]) if kind == "native" else None


def choose_local_set(kernels: KernelName) -> KernelName | None:
    """The instruction set with which a process of this host will compute. kernels: the value of --kernels.

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
