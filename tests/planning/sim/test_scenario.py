from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.small_scenario import DEVICES, MODEL, cluster, scenario

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import KNOWN
from moesaic.planning.sim import durations, routes
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.fields import override
from moesaic.planning.sim.front import generate_items
from moesaic.planning.sim.scenario import load, parse

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"speed": 2}, "speed: got 2; allowed: only these fields: model, seed, duration"),
    ({"workers": {"count": 0}}, "workers.count: got 0; allowed: an integer of at least 1"),
    ({"workers": {"number": 2}}, "workers.number: got 2; allowed: only these fields: count"),
    ({"workers": 4}, "workers: got 4; allowed: a table"),
    ({"schedule": {"kind": "eager"}}, "schedule.kind: got 'eager'; allowed: barrier, lockstep, async"),
    ({"warm_up": 9.0}, "warm_up: got 9.0; allowed: less than duration, 2"),
    ({"workload": {"kind": "poisson"}}, "workload.rate: it is missing, with workload.kind 'poisson'"),
    ({"workload": {"rate": 1.0, "clients": 2}}, "workload.clients: got 2; allowed: only with"),
    (
        {"workload": {"rate": 1.0, "prompt": [9, 3]}},
        "workload.prompt: got [9, 3]; allowed: an integer of at least 1, or [lowest, highest]",
    ),
    ({"workload": {"rate": 1.0, "prompt": 60}}, "workers.max_model_len: got 64; allowed: at least 160"),
    (
        {"routing": {"kind": "zipf", "exponent": -1}},
        "routing.exponent: got -1; allowed: a number of at least 0",
    ),
    ({"routing": {"top_k": 9}}, "routing.top_k: got 9; allowed: 1 to 8, the experts of a layer"),
    ({"routing": {"kind": "profile"}}, "routing.file: got None; allowed: a profile"),
    ({"routing": {"kind": "profile", "file": "no.npz"}}, "no.npz"),
    ({"placement": {"kind": "file"}}, "placement.file: got None; allowed: a placement"),
    ({"placement": {"kind": "file", "file": "no.json"}}, "placement.file: no.json: No such file"),
    ({"placement": {"min_replicas": 3}}, "placement.min_replicas: got 3; allowed: at most servers.count, 2"),
    ({"faults": [{"at": 1.0, "server": 2}]}, "faults.0.server: got 2; allowed: 0 to 1"),
    ({"faults": [{"server": 1}]}, "faults.0.at: it is missing; allowed: a number of at least 0"),
    ({"faults": [{"at": 1, "server": 1, "kind": "freezes"}]}, "faults.0.back: it is missing"),
    ({"devices": ""}, "devices: got ''; allowed: a file of modelled devices"),
    ({"devices": "a200"}, "devices: got 'a200'; allowed: t4, l4"),
    ({"devices": "no.toml"}, "devices: got 'no.toml'; allowed: a file to read"),
    (
        {"devices": {"source": "x"}},
        "devices: the scenario: attention: got None; allowed: a table with points_ms",
    ),
    ({"devices": "h100"}, "links.latency_us: it is missing, with devices 'h100'"),
    ({"servers": {"beside_workers": True, "count": 3}}, "servers.count: got 3; allowed: 2 as workers.count"),
    ({"servers": {"batch_pairs": 4}}, "servers.batch_wait_ms: got 0; allowed: above 0 with servers.batch"),
    ({"placement": {"autoscale": "2"}}, "placement.autoscale: got '2'; allowed: MIN:MAX"),
    ({"placement": {"autoscale": "3:4"}}, "servers.count: got 2; allowed: 3 to 4 with placement.autoscale"),
    (
        {"schedule": {"queue_policy": "flfs", "queue_history": 3}},
        "schedule.queue_policy: got 'flfs'; allowed: defrag with schedule.queue_history",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_wrong_field_is_named_with_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster(**changes)
    text = str(error.value)
    assert message in text and "\n" not in text


def test_a_field_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="model: it is missing; allowed: a model"):
        parse({"devices": DEVICES, "workload": {"rate": 1.0}})


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scenario: got '.*no.toml'; allowed: a file to read"):
        load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("model = ")
    with pytest.raises(ConfigError, match="bad.toml: not a TOML file"):
        load(tmp_path / "bad.toml")


def test_changes_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text(
        'model = "mixtral-8x7b"\ndevices = "h100"\n[workload]\nrate = 1\n[[faults]]\nat = 1\nserver = 0\n'
    )
    changes = ("workers.count=8", "schedule.kind=async", "faults.0.at=2.5", "links.latency_us=3")
    found = load(file, changes)
    assert (found.workers.count, found.schedule.kind, found.faults[0].at) == (8, "async", 2.5)
    assert found.links.latency_us == 3.0


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ("workers.count", "KEY=VALUE"),
        ("=4", "KEY=VALUE"),
        ("seed.x=4", "a key of a table"),
        ("faults.3.at=1", "a number from 0 to 0"),
    ],
)
def test_a_wrong_change(change: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"--set: got '{change}'; allowed: {allowed}"):
        override({"seed": 1, "faults": [{"at": 1}]}, change)


def test_requests_of_a_poisson_process() -> None:
    found = list(generate_items(scenario(duration=50.0)))
    gaps = np.diff([item.arrival for item in found])
    assert np.mean(gaps) == pytest.approx(1 / 40, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 40, rel=0.15)
    assert {item.prompt for item in found} == set(range(3, 10))
    assert {item.answer for item in found} == set(range(4, 13))


def test_requests_of_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n5.0,7,3\n6.0,9,4\n99.0,1,1\n")
    work = {"kind": "trace", "file": str(file), "speed": 2.0}
    found = [(item.arrival, item.prompt, item.answer) for item in generate_items(scenario(workload=work))]
    assert found == [(0.0, 7, 3), (0.5, 9, 4)]
    figures = cluster(workload=work, duration=5.0).run()
    assert (figures.requests, figures.completed, figures.tokens) == (2, 2, 7)
    file.write_text("arrival_s,input_tokens\n")
    with pytest.raises(
        ConfigError, match=r"workload\.file.* lacks the column output_tokens|at least one row"
    ):
        list(generate_items(scenario(workload=work)))


def test_shares_of_routing() -> None:
    assert routes.exponential(4).round(3).tolist() == [0.568, 0.268, 0.128, 0.036]
    assert routes.zipf(3, 1.0).tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    rng = np.random.default_rng(0)
    drawn = routes.draw(routes.exponential(8), 20000, 1, rng)
    assert (np.bincount(drawn[:, 0]) / 20000).tolist() == pytest.approx(routes.exponential(8), abs=0.01)
    pairs = routes.draw(routes.zipf(8, 1.0), 1000, 3, rng)
    assert all(len(set(row)) == 3 for row in pairs.tolist())


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("without", [0, 4])
def test_the_largest_keys_are_the_first_of_all_sorted(top_k: int, without: int) -> None:
    """Experts without a share come last."""
    shares = routes.normalize(np.concatenate([np.arange(1.0, 9.0 - without), np.zeros(without)]))
    found = routes.draw(shares, 500, top_k, np.random.default_rng(4))
    with np.errstate(divide="ignore"):
        keys = np.log(shares) + np.random.default_rng(4).gumbel(size=(500, 8))
    wanted = np.argsort(-keys, axis=1)[:, :top_k]
    assert found.tolist() == wanted.tolist()


def test_a_row_s_experts_depend_on_nothing_else() -> None:
    found = routes.Routes(np.tile(routes.zipf(8, 1.0), (2, 1)), 2, seed=5)
    requests, positions = np.arange(6), np.arange(6) * 3
    every = found.choose_experts(1, routes.number_rows(requests, positions), 0.0)
    for row in range(6):
        alone = found.choose_experts(
            1, routes.number_rows(requests[row : row + 1], positions[row : row + 1]), 7.0
        )
        assert alone.tolist() == [every[row].tolist()]
    assert found.choose_experts(0, routes.number_rows(requests, positions), 0.0).tolist() != every.tolist()


def test_placements(tmp_path: Path) -> None:
    layers = range(MODEL.moe_layers)
    even = cluster().fleet.placement
    assert even.experts_of(0, 0) == (0, 1, 2, 3)
    robin = cluster(placement={"kind": "round-robin"}).fleet.placement
    assert robin.experts_of(1, 2) == (1, 3, 5, 7)
    assert cluster(placement={"min_replicas": 2}).fleet.placement.replicas(0).tolist() == [2] * 8
    file = tmp_path / "placement.json"
    held = {layer + 1: {0: [0, 1, 2, 3, 4, 5], 1: [5, 6, 7]} for layer in layers}
    file.write_text(Placement(0, 8, held, "small").to_json())
    assert cluster(placement={"kind": "file", "file": str(file)}).fleet.placement.experts_of(1, 0) == (
        5,
        6,
        7,
    )
    file.write_text(Placement(0, 8, {0: held[1]}, "small").to_json())
    with pytest.raises(
        ConfigError, match=r"placement\.file: got '1 layers with 8 experts'; allowed: '?4 layers"
    ):
        cluster(placement={"kind": "file", "file": str(file)})


def test_routing_and_placement_of_a_profile(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    shares = np.tile(routes.zipf(8, 1.0), (MODEL.moe_layers, 1))
    experts = np.stack([routes.draw(row, 600, 2, rng) for row in shares], axis=1)
    recorded = Routes(
        rng.integers(0, 64, 600).astype(np.int32),
        np.arange(0, 601, 60),
        np.full(10, 20),
        np.full(10, -1, dtype=np.int16),
        experts,
    )
    profile = Profile.from_routes("small", 64, 8, range(1, 1 + MODEL.moe_layers), recorded)
    file = tmp_path / "profile.npz"
    profile.save(file)
    routing = {"kind": "profile", "file": str(file)}
    built = cluster(routing=routing, placement={"kind": "solver", "solver": "eplb"})
    assert np.allclose(built.shape.routes.shares, profile.loads / 1200)
    assert built.fleet.placement.is_complete and built.fleet.placement.layers == (0, 1, 2, 3)
    figures = built.run()
    load = np.array(figures.expert_load)
    assert max(load) / sum(load) < 0.6
    with pytest.raises(ConfigError, match=r"routing\.file: got '4 layers with 8 experts'; allowed: "):
        cluster(routing=routing | {"experts": 16})
    with pytest.raises(ConfigError, match=r"placement\.solver: got 'best'; allowed: vanilla"):
        cluster(routing=routing, placement={"kind": "solver", "solver": "best"})


def test_devices_of_a_machine() -> None:
    model, machine = KNOWN["mixtral-8x7b"], MACHINES["h100"]
    found = durations.build_machine_devices(model, machine, 500.0)
    read = model.expert_bytes / machine.fast.bandwidth
    assert found.experts.per_expert == read
    assert found.experts.seconds(1, 8) - found.experts.seconds(1, 7) == pytest.approx(read)
    assert machine.fast.processor is not None
    many = 2 * 8192 * model.expert / machine.fast.processor.flops
    assert found.experts.seconds(8192, 0) == pytest.approx(many, rel=0.01)
    assert found.attention.seconds(1) >= sum(model.attention.projected(4096)) * 2 / machine.fast.bandwidth
    links = {"latency_us": 5.0, "gb_per_s": 100.0}
    tables = {"devices": "h100", "links": links, "model": "mixtral-8x7b", "workload": {"rate": 1.0}}
    built = SimulatedCluster(parse(tables), model).devices
    assert (built.link.latency, built.link.bandwidth) == pytest.approx((5e-6, 1e11))
    assert built.source.startswith("h100 by its roofline, 150 cached tokens a request")
