"""Which roles of processes a cluster lets join, and which messages it takes from them."""

from __future__ import annotations

from moesaic.cluster.member import Role
from moesaic.config import WorkerConfig
from moesaic.core import messages

SERVER_MESSAGES = (
    messages.Holds,
    messages.Digests,
    messages.ServerReport,
    messages.Failed,
    messages.LinkTest,  # an answer that came too late
)
"""The messages that an expert server may send."""
RANKS_MESSAGES = (messages.RanksWait, messages.Failed, messages.LinkTest)
"""The messages that the ranks of another host may send."""
MESSAGES_BY_ROLE = {Role.SERVER: SERVER_MESSAGES, Role.RANKS: RANKS_MESSAGES}
"""Workers may send any message."""
ROUTER_MESSAGES = (
    messages.Tokens,
    messages.Admitted,
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
