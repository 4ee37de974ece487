"""Plans over several hosts: what is on which host, the links between them, and what follows from them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.commands import cli
from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel
from moesaic.planning.deployment import serving, spec
from moesaic.planning.deployment.hosts import build_topology, find_device_link
from moesaic.planning.deployment.layouts import Layout, compute_memory, list_spread_layouts
from moesaic.planning.deployment.search import Deployments
from moesaic.planning.deployment.trials import Candidate, Trial
from tests.support import small_plan
from tests.support.small_scenario import MODEL

US = 1e-6
MACHINES: dict[str, Any] = {"names": ["a", "b", "c"], "hosts": 3, "devices": 4, "device": "h100"}
SLOW = {"hosts": ["b", "a"], "latency_us": 50, "gb_per_s": 1}
LINKS = {"latency_us": 10, "gb_per_s": 5, "inside_latency_us": 2, "inside_gb_per_s": 100}


def cluster(*between: Any, **machines: Any) -> spec.ClusterSpec:
    tables = {"machines": [MACHINES | machines], "links": LINKS, "between": list(between)}
    return spec.parse(tables, Path())


def test_worked_example() -> None:
    """Two workers and two servers on the first host, and four servers each on the others."""
    found = build_topology(Layout(cluster().pools[0], 2, 1, 9), cluster(SLOW), part=2.0)
    assert [(host.name, host.workers, host.servers) for host in found.hosts] == [
        ("a", (0, 1), (0, 1)),
        ("b", (), (2, 3, 4, 5)),
        ("c", (), (6, 7, 8)),
    ]
    assert found.intra_host_link == LinkModel(2 * US * 2, 50e9)
    assert found.link("a", "b") == LinkModel(2 * US * 50, 0.5e9), "as stated, over twice the time"
    assert found.link("a", "c") == LinkModel(2 * US * 10, 10e9), "of four devices, over twice the time"


def test_hosts_that_are_alike() -> None:
    [pool] = cluster().pools
    layouts = list(list_spread_layouts(pool, replace(MODEL, experts=9)))
    layout = next(one for one in layouts if one.is_replicated and one.attention_hosts == 3)
    assert layout.describe() == "3 hosts x (1 attention + 3 experts), all experts on each"
    assert (layout.hosts, layout.devices, layout.first_host_servers) == (3, 12, 3)
    found = build_topology(layout, cluster())
    assert [(host.workers, host.servers) for host in found.hosts] == [
        ((0,), (0, 1, 2)),
        ((1,), (3, 4, 5)),
        ((2,), (6, 7, 8)),
    ]
    once = replace(layout, is_replicated=False)
    assert compute_memory(MODEL, layout).server_bytes == pytest.approx(
        3 * compute_memory(MODEL, once).server_bytes, rel=0.35
    )
    assert layout.link(LinkModel(9, 9)) == pool.intra_host_link and once.link(LinkModel(9, 9)) == LinkModel(
        9, 9
    )


def test_a_device_gets_its_share_of_the_slowest_link() -> None:
    [pool] = cluster().pools
    two, three = Layout(pool, 2, 1, 5), Layout(pool, 2, 1, 9)
    assert find_device_link(two, cluster()) == find_device_link(three, cluster()) == LinkModel(US * 10, 5e9)
    assert find_device_link(two, cluster(SLOW)) == LinkModel(US * 50, 0.25e9)
    far = SLOW | {"hosts": ["b", "c"]}
    assert find_device_link(two, cluster(far)) == LinkModel(US * 10, 5e9), "it does not use that link"
    assert find_device_link(three, cluster(far)) == LinkModel(US * 50, 0.25e9)


@pytest.mark.parametrize(
    ("between", "machines", "line"),
    [
        (
            [SLOW | {"hosts": ["a", "d"]}],
            {},
            r"between\.0\.hosts: got .*'d'.*; allowed: two of the hosts a, b, c",
        ),
        ([SLOW | {"gb_per_s": 0}], {}, r"between\.0\.gb_per_s: got 0"),
        ([SLOW, SLOW], {}, r"between\.1\.hosts: .*each pair of hosts once"),
        ([], {"names": ["a", "a", "b"]}, r"machines\.0\.names: got .*; allowed: 3 different names"),
        ([], {"names": "a"}, r"machines\.0\.names: got 'a'; allowed: a list of names"),
    ],
)
def test_wrong_fields(between: list[Any], machines: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        cluster(*between, **machines)


def test_each_host_has_its_commands() -> None:
    machines = cluster()
    search = small_plan.search(spec=machines)
    plan = Deployments(MODEL, machines, search.demand, search.objectives, [], 0, 0, True, 0)
    layout = Layout(machines.pools[0], 6, 1, 6, attention_hosts=3)
    one = Candidate(layout, 64, 512, 1000, relay="always")
    found = dict(serving.list_host_commands(plan, one, "demo"))
    assert list(found) == ["a", "b", "c"] and found["b"] == found["c"]
    join = "moesaic join a:7000 --secret-file cluster.secret"
    assert found["b"] == 2 * [f"{join} --role attention-worker"] + 2 * [join]
    [serve] = found["a"]
    assert "--attention-workers 2 --expert-servers 2" in serve and "--relay always" in serve
    assert "--cluster-address tcp:a:7000" in serve and "--min-replicas" not in serve
    for command in (serve, *found["b"]):
        cli.app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
    copied = Candidate(replace(layout, is_replicated=True), 64, 512, 1000)
    assert "--min-replicas 2" in serving.list_commands(plan, copied, "demo")[0], "as many as servers begin"


def best(between: LinkModel, **more: Any) -> Trial:
    machines = replace(small_plan.machines(6, 2), inter_host_link=between)
    work = {"kind": "closed", "clients": 96, "prompt": [3, 9], "answer": [4, 12]}
    return small_plan.search(spec=machines, workload=work, slo=None, **more).run().trials[0]


@pytest.mark.slow
def test_the_link_decides_whether_rows_leave_their_host() -> None:
    fast, slow = best(LinkModel(1e-6, 1e12)), best(LinkModel(5e-3, 1e5))
    assert fast.candidate.layout.hosts == 2 and not fast.candidate.layout.is_replicated
    assert sum(link.size for ends in fast.figures.host_links.values() for link in ends.values()) > 0
    layout = slow.candidate.layout
    assert layout.is_replicated or layout.hosts == 1
    assert not any(link.size for ends in slow.figures.host_links.values() for link in ends.values())


@pytest.mark.slow
def test_over_a_slow_link_a_plan_chooses_relays_where_rows_have_to_leave() -> None:
    machines = replace(small_plan.machines(12, 2), inter_host_link=LinkModel(1e-4, 2e4))
    work = {"kind": "closed", "clients": 96, "prompt": [3, 9], "answer": [4, 12]}
    search = small_plan.search(spec=machines, workload=work, slo=None, model=replace(MODEL, top_k=4))
    search.run()
    layout = Layout(machines.pools[0], 4, 1, 8, attention_hosts=2)
    estimate = search._estimate_layout(layout)
    assert estimate is not None
    base = Candidate(layout, estimate.max_num_seqs, estimate.max_num_batched_tokens, estimate.kv_tokens)
    tried = [base, *(one for one in search._list_variants(base) if one.relay != "auto")]
    found = {one.relay: search._simulator.simulate(one, estimate).figures.throughput for one in tried}
    assert found["always"] > 1.1 * found["off"] and found["auto"] > 1.1 * found["off"]
