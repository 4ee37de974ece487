"""The formulas of benchmarks/papers that are their own: prices of collectives, objectives, recorded rows."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from moesaic.core.profile import Routes
from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.planning.sim.routes import number_rows

from .conftest import FOLDER

sys.path.append(str(FOLDER / "papers"))

import prices
import serving
import speculative_moe

MODEL, LEVEL = PUBLISHED_MODELS["deepseek-v2-lite"], MACHINES["h100"].fast


def test_a_ring_takes_the_bytes_of_one_rank() -> None:
    links = prices.Links(sends=70.0, latency=1.0)
    assert links.gather(8, 10.0) == pytest.approx(1 + 7 * 10 / 70)
    assert prices.Links(70.0, 7.0, latency=1.0).gather(8, 10.0) == pytest.approx(1 + 7 * 10 / 7)


def test_an_exchange_takes_what_is_not_local() -> None:
    links = prices.Links(sends=10.0, latency=0.0)
    assert links.exchange(8, 10.0, 2, 0.25) == pytest.approx(2 * 0.75 * 10 / 10)
    assert links.exchange(8, 10.0, 2, 1.0) == 0.0


def test_what_crosses_the_halves_of_an_exchange() -> None:
    """Counted pair of ranks by pair of ranks: each rank sends 1/7 of its bytes to each other one."""
    size, halves = 10.0, (range(4), range(4, 8))
    crossing = sum(size / 7 for _ in halves[0] for _ in halves[1])
    links = prices.Links(sends=1e9, across=5.0, latency=0.0)
    assert links.exchange(8, size, 1, 0.0) == pytest.approx(crossing / 5.0)


def test_a_layer_has_the_published_volumes() -> None:
    """Without latency and with slow links: 3 or 2 rings of (G - 1) B S / G, and two all-to-alls."""
    rows, local, links = 64, 0.25, prices.Links(1.0, latency=0.0)
    row = 2.0 * MODEL.hidden
    ring, exchange = 7 / 8 * rows * row, MODEL.top_k * (1 - local) * rows * row / 8
    attended = prices.answers(MODEL, rows, 100)
    for form, rings, exchanges in (("ds-moe", 3, 2), ("shuffled", 2, 2), ("tp", 4, 0)):
        one = prices.layer(MODEL, rows, attended, LEVEL, links, form, local)  # type: ignore[arg-type]
        assert one.reductions == pytest.approx(rings * ring)
        assert one.exchanges == pytest.approx(exchanges * exchange)


def test_the_rate_at_an_objective() -> None:
    assert serving.at_objective([10, 20], [1.0, 3.0], 2.0) == pytest.approx(15)
    assert serving.at_objective([10, 20], [1.0, 3.0], 5.0) == 20
    assert serving.at_objective([10, 20], [2.5, 3.0], 2.0) == 0


def test_rows_choose_the_experts_of_recorded_requests() -> None:
    """Two requests of 2 and 3 tokens. Request 3 is recorded request 1, and its fifth token the second one."""
    experts = np.arange(10, dtype=np.int16).reshape(5, 2, 1)
    recorded = Routes(
        tokens=np.zeros(5, dtype=np.int32),
        starts=np.array([0, 2, 5]),
        prompts=np.array([1, 1], dtype=np.int32),
        topics=np.zeros(2, dtype=np.int16),
        experts=experts,
    )
    routes = serving.LocatedRoutes(np.full((2, 10), 0.1), 1, 0, recorded=recorded)
    rows = number_rows(np.array([0, 1, 3]), np.array([1, 2, 4]))
    assert routes.choose_experts(1, rows, 0.0)[:, 0].tolist() == [experts[token, 1, 0] for token in (1, 4, 3)]


def test_the_batch_within_an_objective_is_the_largest() -> None:
    links = speculative_moe.SERVERS["B"]
    one = speculative_moe.one_layer
    goal = one(MODEL, "tpot", 100, links, "ds-moe", 0.125)[0].whole
    rate, batch = speculative_moe.best(MODEL, "tpot", links, "ds-moe", 0.125, goal)
    assert batch == 100
    assert rate == pytest.approx(100 / goal / MODEL.layers)
