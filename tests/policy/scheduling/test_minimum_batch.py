"""The decisions of a CPU are about those of the old constants; those of the papers' devices are others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.core import curves, paced_devices
from moesaic.core.curves import Curve, DeviceCurves, Thresholds
from moesaic.cost.curves import of_machine
from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.policy.scheduling.minimum_batch import MAX_THRESHOLD, Decisions, Load, cpu_curves, unevenness

PAPER = paced_devices.read(Path(__file__).parents[3] / "benchmarks" / "papers" / "async_moe.toml")
MIXTRAL = (8, 2, 176e6, 42e6)
QWEN = (128, 8, 4.7e6, 21e6)


def alone(decisions: Decisions, part: int, rows: int, idle: float) -> bool:
    return decisions.runs_alone(part, Load(rows, rows, idle))


def on_cpu(experts: int, top_k: int, expert: float, others: float) -> Decisions:
    return Decisions(cpu_curves(expert, others), experts, top_k)


@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
def test_a_cpu_needs_about_64_rows_of_each_expert_and_waits_below_6(model: tuple[int, ...]) -> None:
    decisions = on_cpu(*model)
    experts, top_k, *_ = model
    assert 48 <= decisions.separate_rows * top_k / experts <= 70
    assert 47 <= decisions.partial_answer_rows * top_k / experts <= 70
    assert decisions.min_call_pairs(experts) == pytest.approx(6 * experts, abs=1)
    assert not alone(decisions, decisions.partial_answer_rows - 1, decisions.partial_answer_rows, 1e9)
    assert alone(decisions, 1000, 1000, 0.0) and not alone(decisions, 1, 1000, 1e9)
    assert not decisions.has_expert_queues


def test_the_papers_devices_separate_large_parts_at_once_and_small_ones_where_it_is_idle() -> None:
    decisions = Decisions(replace(PAPER, dilation=1.0).curves, 8, 2)
    assert decisions.separate_rows == 128 and 64 < decisions.partial_answer_rows < 128
    assert alone(decisions, 128, 256, 0.0) and not alone(decisions, 64, 128, 0.0)
    assert alone(decisions, 64, 128, 12.2e-3) and not alone(decisions, 64, 128, 12.0e-3)
    assert alone(decisions, 128, 192, 7.0e-3) and not alone(decisions, 128, 192, 6.8e-3)
    assert decisions.min_call_pairs(2) == 0
    together = Decisions(replace(decisions.curves, shares_cores=True), 8, 2)
    assert together.min_call_pairs(2) == 96, "where it shares its cores it waits below 96 pairs"


@pytest.mark.parametrize(
    "decisions", [on_cpu(*MIXTRAL), on_cpu(8, 2, 1e4, 1e7), Decisions(PAPER.curves, 8, 2)]
)
def test_some_part_runs_alone_if_any_does(decisions: Decisions) -> None:
    for rows in (1, 2, 5, 40, 130, 200, 257, 300, 600):
        for idle in (0.0, 0.05, 0.1, 0.3, 9.0):
            parts = [alone(decisions, part, rows, idle) for part in range(1, rows)]
            assert decisions.any_part_runs_alone(Load(rows, rows, idle)) == any(parts), (rows, idle)
    given = replace(decisions.curves, thresholds=Thresholds(separate_rows=7))
    for rows in (1, 7, 8):
        assert Decisions(given, 8, 2).any_part_runs_alone(Load(rows, rows)) == (rows == 8)


@pytest.mark.parametrize(
    "decisions",
    [
        on_cpu(*MIXTRAL),
        on_cpu(8, 2, 1e4, 1e7),
        Decisions(PAPER.curves, 8, 2),
        Decisions(replace(PAPER.curves, thresholds=Thresholds(separate_rows=7)), 8, 2),
    ],
)
def test_no_part_of_fewer_rows_ever_runs_alone(decisions: Decisions) -> None:
    def may_run(rows: int) -> bool:
        return any(alone(decisions, part, rows, 1e9) for part in range(1, rows))

    assert may_run(decisions.least_rows)
    assert not any(may_run(rows) for rows in range(1, decisions.least_rows))


def test_queues_of_experts_run_alone_where_that_costs_little() -> None:
    decisions = Decisions(PAPER.curves, 8, 2)
    assert decisions.has_expert_queues
    assert decisions.queue_runs_alone([128, 500], 0.5) and decisions.queue_runs_alone([900], 0.5)
    assert not decisions.queue_runs_alone([64, 64], 0.5) and not decisions.queue_runs_alone(
        [64, 128, 128], 0.5
    )
    dear = DeviceCurves("x", PAPER.attention, Curve(((0.0, 1.0), (1.0, 1.0))))
    assert not Decisions(dear, 8, 2).has_expert_queues


def h100(workers: int) -> Decisions:
    """Mixtral on 4 servers with the roofline of an H100. A server reads up to two experts for 0.2 ms."""
    return Decisions(of_machine(MACHINES["h100"], 176e6, 42e6, 2.0), 8, 2, servers=4, workers=workers)


def test_nothing_runs_alone_where_servers_are_busy_with_reading() -> None:
    """64 rows of each of 4 workers: the servers compute for as long as workers wait."""
    served = h100(4).server_seconds(64)
    assert served == pytest.approx(20e-6 + 2 * 2 * 176e6 / 3.35e12, rel=0.01)
    assert not h100(4).any_part_runs_alone(Load(64, 64, idle=4 * served)), "the servers are never idle"
    assert not h100(4).begins(1, Load(64, 64, idle=4 * served)), "so a request begins with the next step"
    assert h100(4).begins(1, Load(0, 0))
    assert not h100(4).queue_runs_alone([64, 64], 0.5) and not Decisions(PAPER.curves, 8, 2).queue_runs_alone(
        [900], 1
    )


def test_parts_run_alone_on_the_same_curves_where_servers_are_mostly_idle() -> None:
    cheap = replace(h100(1), curves=replace(PAPER, dilation=1.0).curves)
    busy = replace(cheap, workers=8)
    assert alone(cheap, 256, 512, 0.0) and not alone(busy, 256, 512, 0.0)
    assert cheap.server_growth(256, 512) == 0.0 < cheap.server_growth(64, 512)


def test_a_server_waits_for_its_clients_where_reading_takes_longer_than_they_are_away() -> None:
    decisions = h100(4)
    assert decisions.should_wait(32, clients=4, away_seconds=0.1e-3, experts=2, in_step=False)
    assert not decisions.should_wait(32, clients=4, away_seconds=0.5e-3, experts=2, in_step=False)
    assert not decisions.should_wait(32, clients=1, away_seconds=0.0, experts=2, in_step=True)
    away = next(a for a in range(500) if not decisions.should_wait(32, 4, 1e-6 * a, 2, in_step=False))
    assert decisions.should_wait(32, 4, 1e-6 * away, 2, in_step=True), "clients in step stay so for longer"
    paper = Decisions(replace(PAPER, dilation=1.0).curves, 8, 2, servers=4, workers=4)
    assert not paper.should_wait(32, clients=4, away_seconds=0.0, experts=2, in_step=False), (
        "workers take 2.7 ms"
    )


def test_a_server_of_shared_cores_does_not_wait_where_the_others_have_another_share_of_each_layer() -> None:
    """Two ranks on two cores: a barrier lets one core idle while the other has most of the layer."""
    cores = Decisions(cpu_curves(1e6, 1e6, measured_rows=5.0), 8, 2, servers=2, workers=2)
    calls = [pairs / 64 for pairs in (96, 32, 96, 32)]
    uneven = unevenness(calls, servers=2)
    assert uneven == 1.5 and unevenness(calls, servers=1) == 1.0 == unevenness([], servers=2)
    assert unevenness([9.0, 0.0, 9.0], servers=4) == 1.0, "a persistent share is what every server waits for"

    def waits(pairs: int, uneven: float) -> bool:
        return cores.should_wait(pairs, 2, 0.0, 4, in_step=False, unevenness_factor=uneven)

    assert waits(64, 1.0) and not waits(64, uneven), "computing counts, and one server has most of it"
    assert waits(4, 1.0) and waits(4, uneven), "reading counts, and each server reads its own experts"


def test_the_dilation_of_modelled_devices_counts() -> None:
    assert alone(Decisions(PAPER.curves, 8, 2), 64, 128, 20 * 12.2e-3)
    assert not alone(Decisions(PAPER.curves, 8, 2), 64, 128, 19 * 12.2e-3)


def test_what_is_given_counts_in_place_of_the_curves() -> None:
    given = Thresholds(separate_rows=7, told_rows=3, waited_pairs=5, queue_pairs=4)
    decisions = Decisions(replace(cpu_curves(1e6, 1e6), thresholds=given), 8, 2)
    assert alone(decisions, 7, 99, 0.0) and not alone(decisions, 6, 99, 9.0) and alone(decisions, 6, 6, 0.0)
    assert (decisions.separate_rows, decisions.partial_answer_rows, decisions.min_call_pairs(8)) == (7, 3, 5)
    assert decisions.queue_runs_alone([1, 4], 1.0) and not decisions.queue_runs_alone([3, 3], 0.0)
    only = replace(given, told_rows=None)
    assert Decisions(replace(decisions.curves, thresholds=only), 8, 2).partial_answer_rows == 7


def test_a_curve_that_never_pays_gives_the_largest_threshold() -> None:
    flat = Curve(((1.0, 1.0),))
    decisions = Decisions(DeviceCurves("x", flat, flat), 8, 2)
    assert (
        decisions.separate_rows
        == MAX_THRESHOLD
        == Decisions(replace(decisions.curves, shares_cores=True), 8, 2).min_call_pairs(8)
    )


def test_a_file_of_modelled_devices_is_one_of_curves(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "papers" / "async_moe.toml"
    found = curves.read(path)
    assert (found.attention, found.experts, found.shares_cores) == (PAPER.attention, PAPER.experts, False)
    assert PAPER.curves.attention == found.attention.times(20.0)
    text = path.read_text() + "[thresholds]\nwaited_pairs = 3\n"
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "b.toml").write_text("shared = true\n" + text)
    assert curves.read(tmp_path / "a.toml").thresholds == Thresholds(waited_pairs=3)
    assert paced_devices.read(tmp_path / "a.toml").curves.thresholds == Thresholds(waited_pairs=3)
    assert curves.read(tmp_path / "b.toml").shares_cores


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
@pytest.mark.parametrize("servers", [2, 4])
def test_no_part_of_64_or_128_rows_runs_alone_on_a_cpu(name: str, servers: int) -> None:
    """docs/ideas/asynchronous-expert-parallelism.md says so: there `async` acts as lockstep."""
    model = PUBLISHED_MODELS[name]
    expert = 3.0 * model.hidden * model.expert_width
    decisions = Decisions(
        cpu_curves(expert, 4.0 * model.hidden**2, 8), model.experts, round(model.top_k), servers, 2
    )
    assert not any(decisions.any_part_runs_alone(Load(rows, rows)) for rows in (64, 128))
