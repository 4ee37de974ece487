"""--pin-threads: the processes of a group compute on different cores."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from moesaic.cluster.cores import Cores
from moesaic.cluster.member import Role
from moesaic.config import ModelConfig, ParallelConfig, WorkerConfig
from moesaic.runtime.group.launcher import rank_config


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
