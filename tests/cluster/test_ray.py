"""Clusters whose processes run on the nodes of a Ray cluster, with real actors and processes."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster.scaling import ScalingLimits
from moesaic.core.errors import ConfigError, ConnectionLost, ScalingError
from tests.cluster.test_identity import alone, workload
from tests.support import cluster_driver, ray_nodes
from tests.support.ray_cluster import (
    actor_pid,
    answers,
    joining,
    on_ray,
    once,
    processes,
    ray,
    serving,
)
from tests.support.ray_nodes import Nodes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:ray.*")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes.running([1, 1, 1]) as started:
        yield started


@pytest.mark.full
def test_whatever_dies_the_tokens_are_those_of_one_process(tmp_path: Path, nodes: Nodes) -> None:
    """`test_ray_soak.py` freezes processes too, and kills them under every schedule."""
    expected = alone(*workload(6, 24))
    nodes.add()  # one of them dies
    with on_ray(tmp_path, nodes, attention_workers=1, expert_servers=1) as running:
        assert len({process.room.node for process in processes(running).values()}) == 2

        # an actor: its process ends with it, and the next one gets an actor of its own
        before = processes(running)["expert server 0"]
        assert answers(running, once(lambda: os.kill(actor_pid(before), signal.SIGKILL))) == expected
        running.until(lambda: processes(running)["expert server 0"] is not before and serving(running))

        # the node of the attention worker and everything on it
        before = processes(running)["attention worker 0"]
        [node] = [one for one in nodes.nodes if one.node_id == before.room.node]
        assert answers(running, once(lambda: nodes.kill(node))) == expected
        running.until(lambda: processes(running)["attention worker 0"] is not before and serving(running))
        assert processes(running)["attention worker 0"].room.node != before.room.node
        assert answers(running) == expected


@pytest.mark.full
def test_a_change_waits_for_a_node(tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(*workload(6, 24))
    with on_ray(tmp_path, nodes, attention_workers=1, expert_servers=2, min_replicas=2) as running:
        # no room is left: the change waits, says why, and goes on with a new node
        scaling = running.supervisor.scale(expert_servers=3)
        running.until(lambda: any(one.waiting for one in running.supervisor.status()))
        [why] = [one.waiting for one in running.supervisor.status() if one.waiting]
        assert re.fullmatch(
            r"waiting for a host: no node has 1 CPU free; \d nodes have 0 of \d CPU free", why
        )
        assert answers(running) == expected
        nodes.add()
        running.until(scaling.done)
        scaling.result()
        assert answers(running) == expected
        assert len({process.room.node for process in processes(running).values()}) == 4

        # and a change that gets no room in time is undone
        monkeypatch.setattr(running.supervisor._changes.changes, "_limits", ScalingLimits(hosts=2.0))
        scaling = running.supervisor.scale(attention_workers=2)
        running.until(scaling.done)
        with pytest.raises(
            ScalingError, match="no node has 1 CPU free; .* given up after 2 s; the cluster is"
        ):
            scaling.result()
        scaling = running.supervisor.scale(expert_servers=2)
        running.until(scaling.done)
        assert answers(running) == expected


@pytest.mark.full
def test_a_pair_is_on_one_node_and_sees_the_gpus_that_ray_gave_it(tmp_path: Path, nodes: Nodes) -> None:
    node = nodes.add(num_cpus=2, num_gpus=2)
    ranks = {"data_parallel_size": 1, "expert_servers": 1, "enable_expert_parallel": True}
    with on_ray(tmp_path, nodes, **ranks) as running:
        started = processes(running)
        assert [process.room.node for process in started.values()] == [node.node_id] * 2
        address = running.supervisor.report().join_address
        seen = [variables(pid) for pid in sorted(joining(str(address)))]
        assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in seen) == ["", "0"]
        assert not any(name.startswith(("RAY_", "OMP_NUM")) for one in seen for name in one)
    nodes.remove(node)


def variables(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(line.split("=", 1) for line in text.split("\0") if line)


@pytest.mark.full
def test_what_a_node_lacks_ends_the_start_with_one_line(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moesaic.cluster.ray_launcher import RayRoom

    init = RayRoom.__init__
    missing = str(tmp_path / "none")
    monkeypatch.setattr(RayRoom, "__init__", lambda self, group, _: init(self, group, missing))
    line = "node .*: --cluster-secret-file: .*none: No such file or directory; every node needs a copy"
    with (
        pytest.raises(ConnectionLost, match=line),
        on_ray(tmp_path, nodes, attention_workers=1, expert_servers=0),
    ):
        pass


@pytest.mark.slow
def test_without_ray_or_a_ray_cluster_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(**settings: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    asked: dict[str, Any] = {"distributed_executor_backend": "ray"}
    line = r"allowed: local, or ray with a .* RAY_ADDRESS \(Could not find any running Ray instance.\)$"
    with monkeypatch.context() as patch:
        patch.setattr(ray, "init", nothing)
        with pytest.raises(ConfigError, match=line), cluster_driver.cluster(**asked):
            pass
    monkeypatch.delitem(sys.modules, "moesaic.cluster.ray_launcher", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    line = r"pip install 'moesaic\[ray\]' first"
    with pytest.raises(ConfigError, match=line), cluster_driver.cluster(**asked):
        pass
