"""Made-up routing: as asked, repeatable, and as concentrated as the published one."""

from __future__ import annotations

from pathlib import Path

import calibration
import numpy as np
import pytest
import routings

from moesaic.core.profile import Profile, Routes
from tests.support import pairs

SMALL = routings.SHAPES[0]


def test_the_k_largest_best_first() -> None:
    logits = np.array([[1.0, 4, 2, 3], [9, 0, 7, 8]], dtype=np.float32)
    assert routings._top(logits, 3).tolist() == [[1, 3, 2], [0, 3, 2]]


def test_concentration_worked_example() -> None:
    """Id 0 chooses experts 0 1, 0 1, 0 2; id 1 chooses 2 3 once. F1 1 1 0.5 1, hotness 5/6 and 1."""
    routes = Routes(
        np.array([0, 0, 0, 1], dtype=np.int32),
        np.array([0, 4]),
        np.array([4]),
        np.array([-1], dtype=np.int16),
        np.array([[[0, 1]], [[0, 1]], [[0, 2]], [[2, 3]]], dtype=np.int16),
    )
    found = calibration.concentration(Profile.from_routes("m", 5, 4, [0], routes))
    expected = [np.percentile(one, (25, 50, 75)) for one in ([1, 1, 0.5, 1], [5 / 6, 1], [1 / 6, 0])]
    assert found == pytest.approx(np.concatenate(expected)[None])


@pytest.fixture(scope="module")
def made() -> Profile:
    return routings.generate(SMALL, layers=3, requests=120, seed=1)


@pytest.mark.slow
def test_what_was_asked_for(made: Profile) -> None:
    assert (made.num_experts, made.top_k, made.layers) == (64, 6, (1, 2, 3))
    assert made.routes.requests == 120
    lengths = np.diff(made.routes.starts)
    assert lengths.min() >= routings.SHORTEST and lengths.max() <= routings.LONGEST
    ordered = np.sort(made.routes.experts, axis=2)
    assert (ordered[:, :, 1:] > ordered[:, :, :-1]).all(), "a token chooses different experts"


@pytest.mark.slow
def test_a_seed_says_it_all(made: Profile) -> None:
    again, other = (routings.generate(SMALL, layers=3, requests=120, seed=seed) for seed in (1, 2))
    assert (again.routes.experts == made.routes.experts).all()
    assert again.routes.tokens.tolist() == made.routes.tokens.tolist() != other.routes.tokens.tolist()


@pytest.mark.slow
def test_it_can_be_placed_from_its_file(made: Profile, tmp_path: Path) -> None:
    made.save(tmp_path / "p.npz")
    assert (Profile.load(tmp_path / "p.npz").loads == made.loads).all()


def test_unseen_ids_have_a_known_one(made: Profile) -> None:
    assert made.nearest is not None
    known = made.counts[0].known_tokens
    assert set(made.nearest.tolist()) == set(known.tolist())
    assert (made.nearest[known] == known).all()


def test_no_expert_is_idle_or_overrun(made: Profile) -> None:
    shares = made.loads / made.loads.mean(axis=1, keepdims=True)
    assert shares.min() > 0.1 and shares.max() < 5


def test_requests_of_a_topic_choose_alike(made: Profile) -> None:
    """Closer to their own topic's shares of the experts than to those of all."""
    routes = made.routes
    chosen = np.zeros((routes.requests, 64))
    np.add.at(chosen, (routes.owners[:, None], routes.experts[:, 1]), 1)
    chosen /= np.linalg.norm(chosen, axis=1, keepdims=True)
    alike = chosen @ chosen.T
    same = routes.topics[:, None] == routes.topics
    np.fill_diagonal(same, False)
    assert alike[same].mean() > alike[routes.topics[:, None] != routes.topics].mean() + 0.02


@pytest.mark.slow
def test_nothing_to_gain_where_choices_are_even() -> None:
    made = routings.uniform(16, 2, layers=2, requests=400)
    for solver in ("vanilla", "kmeans", "metis"):
        assert calibration.rate(made, solver, ranks=4) == pytest.approx(0.25, abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "shape", [SMALL, *(pytest.param(one, marks=pairs.REST) for one in routings.SHAPES[1:])], ids=str
)
def test_the_constants_do_what_they_were_chosen_for(shape: routings.Shape) -> None:
    errors = np.abs(calibration.concentration(routings.generate(shape, 6)) - calibration.PUBLISHED)
    assert errors.mean() < 0.03
    made = routings.generate(shape)
    assert max(calibration.rate(made, solver) for solver in calibration.BASELINES) == pytest.approx(
        0.47, abs=0.005
    )
