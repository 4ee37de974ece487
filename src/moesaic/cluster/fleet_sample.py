"""What the processes of a cluster do now, for the decision how many there should be."""

from __future__ import annotations

from moesaic.cluster.autoscaling import Sample
from moesaic.cluster.members import Members
from moesaic.cluster.router import Router


def take_sample(members: Members, router: Router) -> Sample:
    """The sample of this moment."""
    waiting, prompts = router.stats().waiting, router.waiting_prompts()
    prefill = router.prefill_seconds()
    return Sample(
        processes={
            "expert_servers": len(members.servers),
            "attention_workers": len(members.workers),
            "prefill_workers": len(members.prefill_workers),
        },
        waiting={
            "expert_servers": waiting,
            "attention_workers": waiting - prompts,
            "prefill_workers": prompts,
        },
        missed_objectives=router.objectives.total_misses,
        busy={
            "expert_servers": {member.process_key: member.stats.busy_seconds for member in members.servers},
            "prefill_workers": {
                member.process_key: prefill[member.worker_id]
                for member in members.prefill_workers
                if member.worker_id in prefill
            },
        },
        occupancy=router.measure_occupancy(),
    )
