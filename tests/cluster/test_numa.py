"""Binding to NUMA nodes, planned on made-up trees of /sys and carried out on this machine's own nodes."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cluster import numa
from moesaic.cluster.cores import Cores
from moesaic.cluster.member import Role
from moesaic.cluster.numa import Node
from moesaic.commands import starting
from moesaic.config import ClusterConfig, ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError

TWO = Node(0, (0, 1, 2, 3, 8, 9, 10, 11)), Node(1, (4, 5, 6, 7, 12, 13, 14, 15))
"""Two sockets whose cores have two threads each."""
WORKER = WorkerConfig(ModelConfig("demo"))


def tree(root: Path, lists: dict[int, str]) -> Path:
    for number, cpus in lists.items():
        (root / f"node{number}").mkdir()
        (root / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    (root / "online").write_text("0\n")
    return root


@pytest.mark.parametrize(
    ("lists", "allowed", "found"),
    [
        ({0: "0-1"}, range(2), (Node(0, (0, 1)),)),
        ({0: "0-3,8-11", 1: "4-7,12-15"}, range(16), TWO),
        (
            {0: "0-3", 1: "4-7", 10: "8-11"},
            range(2, 10),
            (Node(0, (2, 3)), Node(1, (4, 5, 6, 7)), Node(10, (8, 9))),
        ),
        ({0: "0-3", 1: ""}, range(4), (Node(0, (0, 1, 2, 3)),)),
        ({0: "0-3", 1: "4-7"}, range(4), (Node(0, (0, 1, 2, 3)),)),
        ({}, range(4), ()),
    ],
    ids=[
        "one",
        "sockets with two threads a core",
        "a container's cores",
        "memory only",
        "one allowed",
        "none",
    ],
)
def test_nodes_are_those_with_cores_of_this_process(
    tmp_path: Path, lists: dict[int, str], allowed: range, found: tuple[Node, ...]
) -> None:
    assert numa.list_nodes(allowed, tree(tmp_path, lists)) == found


def test_a_system_without_nodes(tmp_path: Path) -> None:
    assert numa.list_nodes(range(4), tmp_path / "none") == ()


def planned(nodes: tuple[Node, ...], alike: int) -> list[tuple[list[int], int]]:
    cores = Cores(WORKER, nodes)
    return [
        ([node.number for node in cores.nodes(place, alike)], cores.threads(place, alike))
        for place in range(alike)
    ]


def test_servers_are_divided_among_nodes() -> None:
    assert planned(TWO, 1) == [([0, 1], 16)], "one process uses both"
    assert planned(TWO, 2) == [([0], 8), ([1], 8)]
    assert planned(TWO, 3) == [([0], 4), ([0], 4), ([1], 8)]
    assert planned(TWO, 4) == [([0], 4), ([0], 4), ([1], 4), ([1], 4)]
    uneven = Node(0, (0, 1, 2, 3, 4, 5)), Node(3, (6, 7))
    assert planned(uneven, 2) == [([0], 6), ([3], 2)]


def test_one_node_binds_nothing() -> None:
    assert planned(TWO[:1], 2) == planned((), 2)
    assert [nodes for nodes, _ in planned(TWO[:1], 2)] == [[], []]


def test_pinned_ranks_stay_on_their_node() -> None:
    cores = Cores(WorkerConfig(ModelConfig("demo", pin_threads=True)), TWO)
    for place, node in enumerate(TWO):
        assert cores.cpus(Role.WORKER, place, 2) == node.cpus
        assert cores.nodes(place, 2) == (node,)


@pytest.mark.parametrize(
    ("cluster", "servers"),
    [
        (ClusterConfig(), 2),
        (ClusterConfig(numa="off"), 0),
        (ClusterConfig(expert_servers=3), 3),
        (ClusterConfig(attention_workers=2), 0),
        (ClusterConfig(tensor_parallel_size=2), 0),
        (ClusterConfig(data_parallel_size=2, enable_expert_parallel=True), 2),
    ],
)
def test_a_server_on_each_node_unless_processes_are_given(cluster: ClusterConfig, servers: int) -> None:
    assert cluster.on_nodes(2).resolve().expert_servers == servers
    assert cluster.on_nodes(1) is cluster


def test_serve_says_that_it_starts_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(numa, "list_bindable_nodes", lambda _: TWO)
    monkeypatch.setattr(starting, "NVIDIA", tmp_path / "none")
    assert starting.on_nodes(ClusterConfig(), "auto").expert_servers == 2
    assert "an expert server on each of the NUMA nodes 0, 1; --numa off" in capsys.readouterr().err
    assert starting.on_nodes(ClusterConfig(), "cuda").expert_servers == 0
    monkeypatch.setattr(starting, "NVIDIA", tmp_path)
    assert starting.on_nodes(ClusterConfig(), "auto").expert_servers == 0, "the model goes to the GPU"
    assert capsys.readouterr().err == ""


def test_bad_binding_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--numa: got 'on'; allowed: auto, off"):
        ClusterConfig(numa="on")  # type: ignore[arg-type]
    assert numa.list_bindable_nodes("off") == ()


ASKED = """
import ctypes, os, sys
mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
code = ctypes.CDLL(None).syscall(239, ctypes.byref(mode), mask, 1024, None, 0)
print(code, mode.value, mask[0], *sorted(os.sched_getaffinity(0)))
"""


def child() -> list[int]:
    """What the kernel says of a process started now: result, policy, nodes, cores."""
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="asks by the number of a system call")
def test_a_child_has_the_cores_and_the_policy_and_this_thread_its_own_again() -> None:
    here = numa.list_nodes(os.sched_getaffinity(0))
    if not here or ctypes.CDLL(None).syscall(238, numa.MPOL_DEFAULT, None, 0) != 0:
        pytest.skip("no NUMA nodes, or set_mempolicy is refused here")
    before = child()
    first = Node(here[0].number, here[0].cpus[:1])
    with numa.bind_to_nodes([first]):
        bound = child()
    assert bound == [0, numa.MPOL_PREFERRED, 1 << first.number, first.cpus[0]]
    with numa.bind_to_nodes([here[0], here[0]]):
        assert child()[:3] == [0, numa.MPOL_INTERLEAVE, 1 << first.number]
    assert child() == before
    with numa.bind_to_nodes(()):
        assert child() == before


def test_a_refused_policy_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(numa, "SET_MEMPOLICY", {os.uname().machine: 100_000})
    with caplog.at_level(logging.WARNING), numa.bind_to_nodes([Node(0, tuple(os.sched_getaffinity(0)))]):
        pass
    assert "the memory of processes is not bound to NUMA nodes: Function not implemented" in caplog.text
