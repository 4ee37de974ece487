"""Which roles of processes a cluster lets join, and which messages it takes from them."""

from __future__ import annotations

from moesaic.cluster.member import Role
from moesaic.config import WorkerConfig
from moesaic.core import messages

FROM_SERVER = (
    messages.HoldReply,
    messages.Digests,
    messages.ServerReport,
    messages.WorkerFailed,
    messages.LinkTest,  # an answer that came too late
)
"""The messages that an expert server may send."""
FROM_RANKS = (messages.RanksWait, messages.WorkerFailed, messages.LinkTest)
"""The messages that the ranks of another host may send."""
FROM = {Role.SERVER: FROM_SERVER, Role.RANKS: FROM_RANKS}
"""Workers may send any message."""
TO_ROUTER = (
    messages.Tokens,
    messages.RequestsAdmitted,
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
