from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.policy.placement.link_prices import worth_of
from moesaic.policy.placement.locality import homes_in, measure
from moesaic.policy.placement.redundancy import _carried, copied, demand, place, tables_of
from moesaic.policy.placement.solvers import SOLVERS

HOME = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], dtype=np.bool_)
"""Experts 0 and 1 are on rank 0, 2 and 3 on rank 1."""


def profile(seed: int = 0, experts: int = 6, tokens: int = 200) -> Profile:
    rng = np.random.default_rng(seed)
    chosen = rng.random((tokens, 2, experts)).argsort(axis=2)[:, :, :2].astype(np.int16)
    chosen[::3, :, 0] = 1
    chosen[::3, :, 1] = 0
    routes = Routes(
        rng.integers(0, 20, tokens).astype(np.int32),
        np.array([0, tokens]),
        np.array([tokens]),
        np.array([NO_TOPIC], dtype=np.int16),
        chosen,
    )
    return Profile.from_routes("moe", 20, experts, (3, 5), routes)


def test_worked_example() -> None:
    wanted = np.array([[5, 4], [5, 0], [0, 1], [0, 5]], dtype=np.float64)
    held = copied(wanted, HOME, 1)
    assert held.tolist() == [[True, True], [True, False], [False, True], [False, True]]


def test_balance_counts_where_locality_is_the_same() -> None:
    """A copy of expert 0 or of expert 2 on the other rank makes 6 choices local; rank 1 is the busier one."""
    wanted = np.array([[0, 6], [0, 0], [6, 0], [0, 10]], dtype=np.float64)
    assert copied(wanted, HOME, 1).T.tolist() == [[True, True, True, False], [False, False, True, True]]
    assert copied(wanted, HOME, 2).T.tolist() == [[True, True, True, False], [True, False, True, True]]


@given(st.integers(0, 99), st.integers(1, 4), st.data())
def test_copies_are_shared_out_and_each_rank_has_an_expert_once(
    seed: int, ranks: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    experts = data.draw(st.integers(ranks, 7))
    redundant = data.draw(st.integers(0, experts * (ranks - 1)))
    home = np.arange(experts)[:, None] * ranks // experts == np.arange(ranks)
    held = copied(rng.integers(0, 9, (experts, ranks)).astype(np.float64), home, redundant)
    assert (held >= home).all() and held.sum() == experts + redundant
    assert (held.sum(axis=0) - home.sum(axis=0)).max() <= -(-redundant // ranks)


def test_demand_counts_choices_by_their_tokens_rank() -> None:
    made = profile()
    clusters = SOLVERS["kmeans"](made, 2, 0)
    found = demand(made, clusters, 1)
    expected = np.zeros((6, 2))
    for token, row in zip(made.routes.tokens, made.routes.experts[:, 1], strict=True):
        for expert in row:
            expected[expert, clusters.tokens[1, token]] += 1
    assert (found == expected).all()


def test_every_copy_raises_locality_and_all_of_them_make_everything_local() -> None:
    made = profile()
    clusters = SOLVERS["eplb"](made, 3, 0)
    own = clusters.tokens[:, made.routes.tokens].T
    rates = []
    for redundant in (0, 1, 4, 12):
        placement = place(made, clusters, redundant, "x.npz")
        assert placement.tables == "x.npz" and placement.layers == (3, 5)
        homes = homes_in(placement, made.layers)
        found = measure(made.routes.experts, homes, own, 3)
        rates.append(found.rate)
    assert rates == sorted(set(rates)) and rates[-1] == 1.0


@pytest.mark.parametrize("redundant", [-1, 13])
def test_more_copies_than_ranks(redundant: int) -> None:
    made = profile()
    with pytest.raises(ConfigError, match=f"--redundant-experts: got {redundant}; allowed: 0 to 12"):
        place(made, SOLVERS["vanilla"](made, 3, 0), redundant)


def test_tables_know_of_copies() -> None:
    """If every rank holds every expert, each rank has all pairs of a token. Without copies the ranks' pairs
    add up to them."""
    made = profile()
    clusters = SOLVERS["vanilla"](made, 2, 0)
    seen = made.counts[0].known_tokens
    for redundant, total in ((0, 2 * 2), (6, 2 * 2 * 2)):
        placement = place(made, clusters, redundant)
        tables = tables_of(made, clusters, placement)
        tables.check(placement, "tables")
        assert np.allclose(tables.scores[seen].sum(axis=1), total)


# ---- links


@given(st.integers(0, 99), st.integers(1, 4), st.booleans())
def test_choices_go_to_the_copies_that_are_worth_most(seed: int, ranks: int, alike: bool) -> None:
    """Against a loop. With links that are alike: on the own rank, else shared by all copies."""
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, 9, (5, ranks)).astype(np.float64)
    held = rng.random((5, ranks)) < 0.5
    held[np.arange(5), rng.integers(0, ranks, 5)] = True
    worth = np.eye(ranks) if alike else rng.choice([0.0, 0.5, 1.0], (ranks, ranks))
    carried, best = np.zeros(wanted.shape), np.zeros(wanted.shape)
    for expert in range(5):
        copies = np.flatnonzero(held[expert]).tolist()
        for rank in range(ranks):
            best[expert, rank] = max(worth[copy, rank] for copy in copies)
            asked = [copy for copy in copies if worth[copy, rank] == best[expert, rank]]
            if alike:
                assert asked == ([rank] if held[expert, rank] else copies)
            for copy in asked:
                carried[expert, copy] += wanted[expert, rank] / len(asked)
    found = _carried(wanted, held, worth)
    assert np.allclose(found[0], carried) and np.allclose(found[1], best)


def test_a_copy_goes_to_the_other_host() -> None:
    """Ranks 0 and 1 share a host, and so do 2 and 3. Rank 1 wants expert 0 a little more than rank 2 does.

    A copy on rank 1 saves little, since rank 0 is near. One on rank 2 saves the slow link.
    """
    wanted = np.array([[9, 5, 4, 4], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]], dtype=np.float64)
    home = np.eye(4, dtype=np.bool_)
    prices = np.where(np.arange(4)[:, None] // 2 == np.arange(4) // 2, 1.0, 8.0) * (1 - np.eye(4))
    assert copied(wanted, home, 1)[0].tolist() == [True, True, False, False]
    assert copied(wanted, home, 1, worth_of(prices))[0].tolist() == [True, False, True, False]
