"""--pin-threads: the processes of a group compute on different cores."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from moesaic.cluster.cores import Cores
from moesaic.cluster.member import Role
from moesaic.cluster.numa import Node
from moesaic.config import ModelConfig, ParallelConfig, WorkerConfig
from moesaic.runtime import machine
from moesaic.runtime.group.launcher import rank_config
from moesaic.runtime.limits import Limit


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7}, raising=False)


def worker(pinned: bool = True, cpus: tuple[int, ...] = ()) -> WorkerConfig:
    return WorkerConfig(ModelConfig("demo", pin_threads=pinned), parallel=ParallelConfig(2), cpus=cpus)


def test_ranks_share_the_cores_of_a_worker_that_has_all() -> None:
    ranks = [rank_config(worker(), rank) for rank in range(2)]
    assert [rank.cpus for rank in ranks] == [(4, 5), (6, 7)]
    assert [rank.most_threads for rank in ranks] == [2, 2]
    assert rank_config(worker(pinned=False), 1).cpus == ()


def test_ranks_share_the_cores_of_their_own_host() -> None:
    config = replace(worker(), parallel=ParallelConfig(4, nnodes=2))
    ranks = [rank_config(config, rank) for rank in range(4)]
    assert [rank.cpus for rank in ranks] == [(4, 5), (6, 7)] * 2
    assert [rank.most_threads for rank in ranks] == [2] * 4


def test_each_rank_of_each_group_of_a_cluster_has_its_own() -> None:
    cores = Cores(worker())
    given = [cores.cpus(Role.WORKER, place, None) for place in range(3)]
    assert given == [(4, 5), (6, 7), (4, 5)]
    assert [rank_config(worker(cpus=given[1]), rank).cpus for rank in range(2)] == [(6,), (7,)]


@pytest.mark.parametrize(("quota", "threads"), [(1.5, [1, 1]), (3.0, [1, 1]), (4.0, [2, 2]), (9.0, [2, 2])])
@pytest.mark.parametrize("num_nodes", [0, 2])
def test_processes_share_the_time_that_they_get(
    quota: float, threads: list[int], num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on NUMA nodes, each of which has two of the four cores."""
    monkeypatch.setattr(machine, "cpu_quota", lambda: Limit(quota, "cpu.max of the control group /"))
    nodes = [Node(0, (4, 5)), Node(1, (6, 7))][:num_nodes]
    cores = Cores(worker(pinned=False), nodes)
    assert [cores.threads(place, 2) for place in range(2)] == threads
    assert [rank_config(worker(pinned=False), rank).most_threads for rank in range(2)] == threads
