"""Starts the cluster of a shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from scripts.soak.faults import SETTINGS, sizes
from scripts.soak.shapes import Shape
from tests.support.cluster_driver import Cluster, cluster
from tests.support.faulty_transport import Faults
from tests.support.faulty_worker import faulty

from moesaic.cluster import launcher
from moesaic.cluster.local import ChildProcess
from moesaic.cluster.member import RestartRule
from moesaic.config import ExpertServerConfig
from moesaic.policy.fleet.autoscale import AutoscaleRule

FROZEN_SECONDS = 2.0
"""Seconds after which the supervisor restarts a frozen process. Shorter than its default, so that a freeze of
3 s triggers it.
"""
BAD = Faults(delay=0.3, duplicate=0.2, reorder=True, cut_after=150)
"""Faults of connections that need no replica."""
WORSE = replace(BAD, drop_request=0.005, drop=0.0005)
"""Faults that also lose messages. Lost pairs are asked of another server. At a barrier nobody can know that
one was lost.
"""
MEMORY = {"demo": 1 << 20}
"""Bytes of experts in each server whose memory is small: 13 of the 72 that one of two has of the demo."""
TINY_MEMORY = 128 << 10
"""The same for tiny models."""
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
QUICK = {"high": 0.25, "low": 0.1, "queue": 1.0, "up_seconds": 0.0, "down_seconds": 1.0, "cooldown": 1.0}
"""Thresholds of autoscaling that a few requests reach, and short times."""
PATIENT = RestartRule(first_delay=0.1, longest_delay=1.0, max_deaths=1000)
"""Rounds follow each other so closely that a process dies more often than a supervisor should put up with."""


@contextmanager
def cluster_of(shape: Shape, model: str) -> Iterator[Cluster]:
    """A cluster that serves `model` until the context ends."""
    with (
        patch("moesaic.cluster.supervisor.FROZEN_SECONDS", FROZEN_SECONDS),
        patch.object(AutoscaleRule, "parse", classmethod(_quick_rule)),
        _over_tcp() if shape.transport == "tcp" else nullcontext(),
        _connections(shape),
        cluster(
            model,
            schedule=shape.schedule,
            inflight_batches=shape.inflight_batches,
            queue_policy=shape.queue_policy,
            attention_workers=shape.attention_workers,
            prefill_workers=shape.prefill_workers,
            expert_servers=shape.expert_servers,
            min_replicas=shape.min_replicas,
            redundant_experts=shape.redundant_experts,
            max_num_batched_tokens=shape.chunk,
            kernels=shape.kernels,
            combine=shape.combine,
            transport="auto" if shape.transport == "tcp" else shape.transport,
            tensor_parallel_size=shape.ranks,
            server_memory=MEMORY.get(shape.model, TINY_MEMORY) if shape.small_memory else None,
            speculative_config=DRAFTS if shape.drafts else None,
            autoscale=_limits(shape) if shape.autoscale else None,
        ) as served,
    ):
        served.supervisor._rule = PATIENT
        yield served


def _limits(shape: Shape) -> str:
    """Each role has its usual number of processes, or one more."""
    roles = [(SETTINGS[role].replace("_", "-"), number) for role, number in sizes(shape).items() if number]
    return ",".join(f"{role}={number}:{number + 1}" for role, number in roles)


_parse = AutoscaleRule.parse


def _quick_rule(cls: type[AutoscaleRule], text: str) -> AutoscaleRule:
    return replace(_parse(text), **QUICK)


def _connections(shape: Shape) -> AbstractContextManager[None]:
    """Wraps the connections of the workers that start inside the context."""
    if not shape.bad_connections:
        return nullcontext()
    return faulty(WORSE if shape.min_replicas > 1 and shape.schedule != "barrier" else BAD, seed=7)


def _over_tcp() -> Any:
    """Makes clients reach servers through TCP. On one host they then use sockets instead of shared memory."""
    spawn = launcher.spawn_server

    def spawned(config: ExpertServerConfig) -> ChildProcess:
        return spawn(replace(config, address="tcp:127.0.0.1:0"))

    return patch("moesaic.cluster.launcher.spawn_server", spawned)
