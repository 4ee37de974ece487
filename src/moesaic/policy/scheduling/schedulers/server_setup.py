"""How an expert server's scheduler is set up for a schedule: its start rule, queue policy and queues.

Question: How is a schedule (`--schedule`) added, and where is it built?
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.policy.scheduling.microqueue import QueuePolicy, make_policy
from moesaic.policy.scheduling.minimum_batch import Decisions, unevenness
from moesaic.policy.scheduling.schedulers.expert_server import (
    EnoughPairs,
    ExpertServerScheduler,
    StartRule,
    WaitByCurves,
    WaitForSmallCalls,
    Waiting,
)

SEPARATE = "async", "auto"
"""Schedules whose rows may go on without others."""
IN_ROUNDS = "barrier", "auto"
"""Schedules whose servers may wait for all workers. Workers also call servers for which they have no rows."""
UNREACHABLE_PAIRS = 1 << 62
"""More pairs than can ever wait, so a run starts only when every client's rows have arrived."""
BARRIER_SECONDS = 1.0
"""Maximum seconds that a run waits for all clients.

A client that is later has died or uses another server.
"""
LONGEST_WAIT, WAITED_RUNS = 0.1, 3.0
"""Maximum time that a server waits for clients that have not called yet: in seconds, and in mean run times.

A client that is one layer behind has caught up by then.
"""
IN_STEP = "flfs"
"""The queue policy of all schedules but async, which has its own setting.

If the fuller queue ran first, clients that are out of step would stay so. Two servers could even each wait
for the client that the other one serves later. With flfs the client that is behind runs first, and then
catches up with the others.
"""


def start_rule(
    schedule: str, decisions: Decisions, experts: int, pairs: int | None, wait: float
) -> StartRule:
    """The rule by which a server of this schedule begins its runs.

    experts: maximum number of experts per layer that the server begins with. pairs: --expert-batch-pairs, or
    None to decide by the curves. wait: --expert-batch-wait in seconds.
    """
    if schedule == "barrier":
        return EnoughPairs(UNREACHABLE_PAIRS, BARRIER_SECONDS)
    if pairs is None:
        small = WaitForSmallCalls(decisions.min_call_pairs(experts), LONGEST_WAIT, WAITED_RUNS)
        if schedule != "auto":
            return small

        def should_wait(waiting: Waiting) -> bool:
            calls = waiting.mean_call, waiting.clients, waiting.away_seconds
            uneven = unevenness(waiting.calls, decisions.servers)
            return decisions.should_wait(*calls, experts, waiting.in_step, uneven)

        return WaitByCurves(should_wait, BARRIER_SECONDS, WAITED_RUNS, small)
    return EnoughPairs(pairs, wait)


def queue_policy(schedule: str, name: str, urgency: float | None, history: int) -> QueuePolicy:
    """The rule that says which queue runs next. name, urgency, history: settings of the schedule async."""
    return make_policy(name, urgency, history=history) if schedule == "async" else make_policy(IN_STEP)


def server_scheduler(
    schedule: str, layers: Sequence[int], policy: QueuePolicy, rule: StartRule, decisions: Decisions
) -> ExpertServerScheduler:
    """Build a server's scheduler.

    With --schedule async and auto it has a queue for each expert, if the curves say that this pays.
    """
    if schedule not in SEPARATE or not decisions.has_expert_queues:
        return ExpertServerScheduler(layers, policy, rule)
    return ExpertServerScheduler(layers, policy, rule, decisions.num_experts, decisions.queue_runs_alone)
