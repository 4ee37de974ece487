"""What the next thread of the supervisor finds, and what it makes of it.

The processes, their connections and the state of the cluster belong to no thread, and neither does a change
that waits. Only what the last thread was doing when it ended may be half done:

- A change in the middle of which it ended is undone, or counts as done if clients route by its placement.
  One that a user asked for is begun again, once.
- Every process is told again what it has to know.
- The end of a process that nobody handled is noticed by its reader thread, which has ended too
  (`Supervisor._check`).
"""

from __future__ import annotations

from moesaic.cluster.change_queue import ChangeQueue
from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.router import Router


def recover(members: Members, publisher: Publisher, router: Router, changes: ChangeQueue) -> None:
    """Puts the cluster into a state from which the next thread can go on."""
    if changes.drop_broken_changes():
        publisher.next_placement = None  # the change that prepared it is gone
        for member in members.all_members:
            if member.on_trial:
                _settle(member, members, publisher)
            elif member.stage is Stage.DRAINING and member.complaint is None:
                _leave(member, members, publisher, changes)
    known_workers = router.stats_by_worker()
    for worker in members.clients:
        serves = worker.stage is Stage.SERVING and worker.info is not None and worker.child is not None
        if serves and worker.worker_id not in known_workers:
            assert worker.child is not None and worker.info is not None
            prefill = worker.role is Role.PREFILL
            router.join(worker.worker_id, worker.child.connection, worker.info, prefill, worker.kv)
    for server in members.servers:
        publisher.hold(server)
    publisher.publish()
    router.tell_ready()


def _settle(member: Member, members: Members, publisher: Publisher) -> None:
    """Keeps a member on trial that serves already. Removes it otherwise: one that joined joins again."""
    placement = publisher.placement
    is_used = placement is not None and member.number in placement.servers
    if member.stage is Stage.SERVING and (member.role is not Role.SERVER or is_used):
        member.on_trial = False
        return
    if member.is_external and member.child is not None:
        member.child.kill()
    members.remove(member)


def _leave(member: Member, members: Members, publisher: Publisher, changes: ChangeQueue) -> None:
    """Goes on with a removal. A server whose experts nobody has taken over yet serves again."""
    placement = publisher.placement
    if member.role is not Role.SERVER:
        changes.leave(member)
    elif placement is not None and member.number in placement.servers:
        member.stage = Stage.SERVING
    else:
        members.remove(member)
