"""Gives the attention workers and expert servers of a cluster their places in its NVSHMEM job.

The job is formed once: nobody can leave it, and nobody can be added. Its PEs are the attention workers, then
the expert servers, each in the order of their numbers. PE 0 is the worker that made the unique ID. Prefill
workers compute no decode steps, so they are not in it.

Question: Who is in an NVSHMEM job (`--transport nvshmem`), and as which PE?
"""

from __future__ import annotations

import contextlib
import logging

from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.members import Members
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import JoinJob

LOG = logging.getLogger(__name__)
NOT_IN_JOB = "%s is not in the NVSHMEM job, %s: decode steps that need it are computed in parts"
JOINED_TOO_LATE = "which was formed before it served"
UNABLE = "as its process cannot join one"
_Process = tuple[Role, int, int]
"""Role, number and incarnation."""


class NvshmemPlaces:
    """The places in the job of one cluster. Only the supervisor's thread uses it."""

    def __init__(self, members: Members, cluster: ClusterConfig) -> None:
        self._members, self._is_nvshmem = members, cluster.transport == "nvshmem"
        self._least = cluster.nvshmem_pes or cluster.attention_workers + cluster.expert_servers
        """Processes with which the job is formed."""
        self._places: dict[_Process, JoinJob] | None = None
        """Empty: no job can be formed. None: it is not formed yet."""
        self._placed_processes: set[_Process] = set()
        """Processes that have their place, or whose lack of one was logged."""

    def look(self) -> None:
        """Forms the job once enough processes serve, and says which others are not in it.

        Where a thread of the supervisor has ended in the middle of it, the next one goes on.
        """
        if self._places is None and self._is_nvshmem and self._complete:
            self._places = self._form_job()
        for member in self._job_members if self._places else ():
            process = _process(member)
            place = self._places.get(process) if self._places else None
            if process in self._placed_processes or (place is None and member.stage is not Stage.SERVING):
                continue
            if place is None:
                LOG.warning(NOT_IN_JOB, member.name, JOINED_TOO_LATE if _joins(member) else UNABLE)
            elif member.child is not None:
                with contextlib.suppress(ConnectionLost):  # its reader thread reports it
                    member.child.connection.send(place)
            self._placed_processes.add(process)

    @property
    def _job_members(self) -> list[Member]:
        return [*self._members.workers, *self._members.servers]

    @property
    def _complete(self) -> bool:
        """Whether enough processes serve, and none is being added, removed or restarted."""
        is_settled = self._members.all_serve and not any(
            member.on_trial for member in self._members.all_members
        )
        return is_settled and len(self._job_members) >= self._least

    def _form_job(self) -> dict[_Process, JoinJob]:
        """The place of each process that can join a job."""
        able = [
            sorted(filter(_joins, members), key=_number)
            for members in (self._members.workers, self._members.servers)
        ]
        workers, servers = able
        if not (workers and servers):
            missing_role = "expert server" if workers else "attention worker"
            LOG.warning("no %s can join an NVSHMEM job: decode steps are computed in parts", missing_role)
            return {}
        LOG.info("an NVSHMEM job: %d attention workers and %d expert servers", len(workers), len(servers))
        sizes = len(workers), len(servers)
        return {
            _process(member): JoinJob(workers[0].job_id, pe, *sizes)
            for pe, member in enumerate([*workers, *servers])
        }


def _joins(member: Member) -> bool:
    """Whether the process said that it can join a job."""
    return member.can_join_job or bool(member.job_id)


def _number(member: Member) -> int:
    return member.number


def _process(member: Member) -> _Process:
    return member.role, *member.process_key
