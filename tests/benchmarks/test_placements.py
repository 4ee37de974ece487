"""What the placement benchmark computes from what it measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import placement_tables
import placements
import pytest
import routings
from countdown import Clock, time_left
from placement_bounds.bounds import upper_bound
from rich.console import Console

from moesaic.core.profile import Profile
from moesaic.policy.placement import held_out


def row(solver: str, rate: float, balance: float = 0.9, **more: Any) -> dict[str, Any]:
    known = {"routing": "made-up", "ranks": 8, "solver": solver, "seed": 0, "seconds": 1.0, "notes": []}
    numbers = {
        "token": rate,
        "request": rate / 2,
        "rounds": rate / 4,
        "fitted": rate,
        "mean_over_max": balance,
    }
    return {**known, **numbers, "max_over_median": 1.1, "tokens_mean_over_max": 0.8, **more}


def judged(*rows: dict[str, Any]) -> dict[str, Any]:
    """At token level."""
    return placement_tables.ratios(placement_tables.means(rows))[0]


def test_means_are_over_seeds() -> None:
    rows = [row("ours", 0.4, notes=["a"]), row("metis", 0.3), row("ours", 0.6, seed=1, notes=["a", "b"])]
    first, second = placement_tables.means(rows)
    assert (first["solver"], first["seeds"], first["notes"]) == ("ours", 2, ["a", "b"])
    assert (first["token"], first["request"]) == pytest.approx((0.5, 0.25))
    assert (second["solver"], second["token"], second["seeds"]) == ("metis", 0.3, 1)


def test_ratios_worked_example() -> None:
    found = judged(row("vanilla", 0.4, 0.95), row("metis", 0.5, 0.7), row("ours", 0.6, 0.9))
    assert (found["level"], found["best_other"]) == ("token", "metis")
    numbers = [found[name] for name in ("of_best", "as_even", "best_of_vanilla")]
    assert numbers == pytest.approx([1.2, 1.5, 1.5])
    assert (found["balance"], found["best_other_balance"]) == (0.9, 0.7)


def test_the_better_baseline_counts_and_all_have_to_be_there() -> None:
    both = [row("metis", 0.4), row("kmeans", 0.5)]
    assert judged(*both, row("speculative", 0.6))["speculative"] == pytest.approx(1.2)
    assert judged(both[0], row("speculative", 0.6))["speculative"] is None
    assert judged(*both)["speculative"] is None


def test_the_bound_is_one_of_token_level() -> None:
    rows = placement_tables.means(
        [row("ours", 0.6, token_bound=0.8, fitted_bound=0.75), row("vanilla", 0.4, token_bound=0.8)]
    )
    token, request, rounds = placement_tables.ratios(rows)
    assert (token["of_bound"], token["fitted_of_bound"]) == pytest.approx((0.75, 0.8))
    assert "of_bound" not in request and "of_bound" not in rounds


def test_verdict_names_the_cells_that_fall_short() -> None:
    rows = [row("moetuner", 0.4), row("sem-moe", 0.5), row("ours", 0.6, 0.8), row("vanilla", 0.2)]
    rows += [{**one, "ranks": 2, "token": 0.5} for one in rows]
    sem, best, even = placement_tables.verdict(placement_tables.ratios(placement_tables.means(rows)))
    assert sem == "sem-moe / moetuner, goal 1.15x: 5 of 6 cells; not made-up x2 token"
    assert best.startswith("ours above the best other, balance equal or better: 0 of 6 cells; not made-up x8")
    assert even.endswith("6 of 6 cells")


def test_uniform_routing_is_judged_apart() -> None:
    rows = [row("vanilla", 0.5), row("ours", 0.51)]
    found = placement_tables.ratios(
        placement_tables.means({**one, "routing": "uniform 64 top-6"} for one in rows)
    )
    [line] = placement_tables.verdict(found)
    assert line.startswith("uniform routing") and line.endswith("1.020x vanilla")


def test_time_left_goes_by_steps_of_the_same_name() -> None:
    assert time_left([("a", 1.0), ("a", 3.0), ("b", 8.0)], ["a", "b", "c"]) == pytest.approx(2 + 8 + 4)
    assert time_left([("a", 1.0)], []) == 0


def test_a_step_is_told_and_its_answer_handed_on(capsys: pytest.CaptureFixture[str]) -> None:
    def step(tell: Any) -> str:
        tell(1, 2)
        return "done"

    with Clock(["a", "a"]) as clock:
        clock.what = "here"
        assert clock.timed("a", step) == "done"
    assert "here, a:" in capsys.readouterr().err


@pytest.fixture(scope="module")
def made() -> Profile:
    return routings.generate(routings.SHAPES[0], layers=2, requests=40)


@pytest.mark.slow
def test_no_solver_is_above_the_bounds(made: Profile) -> None:
    learned, others = held_out.split(made, 0.2, 0)
    limits = placements.bounds(learned, others, 4, 5)
    for solver in ("vanilla", "kmeans"):
        found = placements.trial(solver, learned, others, 4, 0)
        assert 0 < found["token"] <= limits["token_bound"] <= 1
        assert found["token"] < found["fitted"] <= limits["fitted_bound"] <= 1
    assert limits["fitted_bound"] == upper_bound(learned, 4, rounds=5).mean() != limits["token_bound"]
    assert placements.bounds(learned, others, 4, 0) == {}


@pytest.mark.slow
def test_each_domain_is_measured_with_every_other_ones_placement(made: Profile) -> None:
    counts = np.bincount(made.routes.topics, minlength=len(made.topics))
    parts = placements.by_topic(made, 0.5, 0, lambda profile: profile)
    assert list(parts) == [topic for topic, count in zip(made.topics, counts, strict=True) if count > 1]
    for topic, (learned, others) in parts.items():
        assert {made.topics[one] for one in (*learned.routes.topics, *others.topics)} == {topic}
    tests = {topic: others for topic, (_, others) in parts.items()}
    rates = {}
    for topic, (learned, _) in parts.items():
        found = placements.carried_over("kmeans", learned, tests, 2, 0)["on"]
        rates[topic] = found
        assert list(found) == list(parts)
    own = np.mean([rates[topic][topic]["token"] for topic in parts])
    foreign = np.mean([rates[a][b]["token"] for a in parts for b in parts if a != b])
    assert own > foreign


def test_unseen_ids_take_their_neighbours_place(made: Profile) -> None:
    routes = replace(made.routes, tokens=made.routes.tokens % 50)
    few = Profile.from_routes("demo", 4096, made.num_experts, made.layers, routes)
    found = placements.neighbours("demo")(few).nearest
    assert found is not None and len(found) == 4096
    assert set(found.tolist()) == set(range(50))


def test_tables_show_every_solver_and_domain(tmp_path: Path) -> None:
    rows = [row("vanilla", 0.4), row("ours", 0.6, token_bound=0.8, fitted_bound=0.75)]
    size = {"experts": 64, "top_k": 6, "layers": 2, "learned_requests": 20, "learned_tokens": 2000}
    size |= {"held_out_requests": 80, "held_out_tokens": 8000, "unseen": 0.2}
    rate = {"token": 0.7, "request": 0.3}
    moved = {"ranks": 4, "solver": "ours", "solved_on": "maths", "on": {"maths": rate, "code": rate}}
    found = {"rows": rows, "sizes": {"made-up": [size]}, "transfer": [moved]}
    with (tmp_path / "shown").open("w+") as file:
        placement_tables.show(found, Console(file=file, width=140))
        file.seek(0)
        text = file.read()
    assert all(part in text for part in ("75.0%", "80.0%", "0.700 / 0.300", "4 ranks", "2,000 tokens"))
