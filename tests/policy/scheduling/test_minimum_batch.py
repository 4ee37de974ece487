"""The decisions of a CPU are about those of the old constants; those of the papers' devices are others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.core import curves, paced
from moesaic.core.curves import Curve, DeviceCurves, Thresholds
from moesaic.policy.scheduling.minimum_batch import MOST, Decisions, cpu_curves

PAPER = paced.read(Path(__file__).parents[3] / "benchmarks" / "papers" / "async_moe.toml")
MIXTRAL = (8, 2, 176e6, 42e6)
QWEN = (128, 8, 4.7e6, 21e6)


def on_cpu(experts: int, top_k: int, expert: float, others: float) -> Decisions:
    return Decisions(cpu_curves(expert, others), experts, top_k)


@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
def test_a_cpu_needs_about_64_rows_of_each_expert_and_waits_below_6(model: tuple[int, ...]) -> None:
    decisions = on_cpu(*model)
    experts, top_k, *_ = model
    assert 48 <= decisions.separate_rows * top_k / experts <= 70
    assert 47 <= decisions.told_rows * top_k / experts <= 70
    assert decisions.waited_pairs(experts) == pytest.approx(6 * experts, abs=1)
    assert not decisions.alone(decisions.told_rows - 1, decisions.told_rows, idle=1e9)
    assert decisions.alone(1000, 1000, idle=0.0) and not decisions.alone(1, 1000, idle=1e9)
    assert not decisions.has_expert_queues


def test_the_papers_devices_separate_large_parts_at_once_and_small_ones_where_it_is_idle() -> None:
    decisions = Decisions(replace(PAPER, dilation=1.0).curves, 8, 2)
    assert decisions.separate_rows == 128 and decisions.told_rows == 0
    assert decisions.alone(128, 256, idle=0.0) and not decisions.alone(64, 128, idle=0.0)
    assert decisions.alone(64, 128, idle=10.8e-3) and not decisions.alone(64, 128, idle=10.7e-3)
    assert decisions.alone(128, 192, idle=5.4e-3) and not decisions.alone(128, 192, idle=5.3e-3)
    assert decisions.waited_pairs(2) == 0 and decisions.told_rows == 0
    together = Decisions(replace(decisions.curves, shared=True), 8, 2)
    assert together.waited_pairs(2) == 96, "where it shares its cores it waits below 96 pairs"


@pytest.mark.parametrize(
    "decisions", [on_cpu(*MIXTRAL), on_cpu(8, 2, 1e4, 1e7), Decisions(PAPER.curves, 8, 2)]
)
def test_some_part_runs_alone_if_any_does(decisions: Decisions) -> None:
    for rows in (1, 2, 5, 40, 130, 200, 257, 300, 600):
        for idle in (0.0, 0.05, 0.1, 0.3, 9.0):
            parts = [decisions.alone(part, rows, idle) for part in range(1, rows)]
            assert decisions.some_alone(rows, idle) == any(parts), (rows, idle)
    given = replace(decisions.curves, thresholds=Thresholds(separate_rows=7))
    for rows in (1, 7, 8):
        assert Decisions(given, 8, 2).some_alone(rows, 0.0) == (rows == 8)


def test_queues_of_experts_run_alone_where_that_costs_little() -> None:
    decisions = Decisions(PAPER.curves, 8, 2)
    assert decisions.has_expert_queues
    assert decisions.queues_apart([128, 500]) and decisions.queues_apart([9])
    assert not decisions.queues_apart([64, 64]) and not decisions.queues_apart([64, 128, 128])
    dear = DeviceCurves("x", PAPER.attention, Curve(((0.0, 1.0), (1.0, 1.0))))
    assert not Decisions(dear, 8, 2).has_expert_queues


def test_the_dilation_of_modelled_devices_counts() -> None:
    assert Decisions(PAPER.curves, 8, 2).alone(64, 128, idle=20 * 10.8e-3)
    assert not Decisions(PAPER.curves, 8, 2).alone(64, 128, idle=19 * 10.8e-3)


def test_what_is_given_counts_in_place_of_the_curves() -> None:
    given = Thresholds(separate_rows=7, told_rows=3, waited_pairs=5, queue_pairs=4)
    decisions = Decisions(replace(cpu_curves(1e6, 1e6), thresholds=given), 8, 2)
    assert decisions.alone(7, 99, 0.0) and not decisions.alone(6, 99, 9.0) and decisions.alone(6, 6, 0.0)
    assert (decisions.separate_rows, decisions.told_rows, decisions.waited_pairs(8)) == (7, 3, 5)
    assert decisions.queues_apart([1, 4]) and not decisions.queues_apart([3, 3])
    only = replace(given, told_rows=None)
    assert Decisions(replace(decisions.curves, thresholds=only), 8, 2).told_rows == 7


def test_a_curve_that_never_pays_gives_the_largest_threshold() -> None:
    flat = Curve(((1.0, 1.0),))
    decisions = Decisions(DeviceCurves("x", flat, flat), 8, 2)
    assert (
        decisions.separate_rows
        == MOST
        == Decisions(replace(decisions.curves, shared=True), 8, 2).waited_pairs(8)
    )


def test_a_file_of_modelled_devices_is_one_of_curves(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "papers" / "async_moe.toml"
    found = curves.read(path)
    assert (found.attention, found.experts, found.shared) == (PAPER.attention, PAPER.experts, False)
    assert PAPER.curves.attention == found.attention.times(20.0)
    text = path.read_text() + "[thresholds]\nwaited_pairs = 3\n"
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "b.toml").write_text("shared = true\n" + text)
    assert curves.read(tmp_path / "a.toml").thresholds == Thresholds(waited_pairs=3)
    assert paced.read(tmp_path / "a.toml").curves.thresholds == Thresholds(waited_pairs=3)
    assert curves.read(tmp_path / "b.toml").shared
