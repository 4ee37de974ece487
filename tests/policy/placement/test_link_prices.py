"""Prices of links: against loops that count one token after another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.placement.link_prices import HostMap, link_loads, worth_of
from moesaic.policy.placement.locality import hosts


def test_the_worth_of_a_pair_falls_with_its_price() -> None:
    prices = np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 4.0], [4.0, 4.0, 0.0]])
    assert worth_of(prices)[:, 0].tolist() == [1.0, 0.75, 0.0]


def test_equal_links_count_local_pairs() -> None:
    assert worth_of(1e-9 * (1 - np.eye(3))).tolist() == np.eye(3).tolist()
    assert worth_of(np.zeros((2, 2))).tolist() == np.ones((2, 2)).tolist()


def ranks_on(places: list[int], count: int) -> HostMap:
    """Ranks on these hosts."""
    where = np.array(places)
    return HostMap(np.zeros((len(where), len(where))), where, where, count, workers_are_ranks=True)


def test_rows_pairs_and_rows_once_a_host() -> None:
    found = np.array([[[0, 2, 3, 3]]], dtype=np.int16)
    loads = link_loads(found, np.array([[0]], dtype=np.int16), ranks_on([0, 0, 1, 1], 2))
    assert (loads.pairs[0, 1], loads.rows[0, 1], loads.rows_once_per_host[0, 1]) == (3, 2, 1)
    assert loads.pairs.sum() == 3
    assert loads.sizes(8.0).tolist() == [[0, 16], [24, 0]]
    assert loads.sizes(8.0, once_per_host=True).tolist() == [[0, 8], [24, 0]]
    assert loads.seconds(np.array([[1.0, 2.0], [2.0, 1.0]]), 8.0) == 80


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3))
def test_loads_are_those_of_a_loop(seed: int, ranks: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, layers, k = 7, 2, 3
    found = rng.integers(0, ranks, (tokens, layers, k)).astype(np.int16)
    own = rng.integers(0, ranks, (tokens, layers)).astype(np.int16)
    places = rng.integers(0, count, ranks)
    pairs, rows, once = np.zeros((count, count)), np.zeros((count, count)), np.zeros((count, count))
    for token in range(tokens):
        for layer in range(layers):
            rank = int(own[token, layer])
            others = [int(server) for server in found[token, layer] if server != rank]
            for server in others:
                pairs[places[rank], places[server]] += 1
            for server in set(others):
                rows[places[rank], places[server]] += 1
            for host in {places[server] for server in others if places[server] != places[rank]}:
                once[places[rank], host] += 1
            near = [server for server in set(others) if places[server] == places[rank]]
            once[places[rank], places[rank]] += len(near)
    loads = link_loads(found, own, ranks_on(places.tolist(), count))
    assert np.allclose(loads.pairs * tokens, pairs)
    assert np.allclose(loads.rows * tokens, rows)
    assert np.allclose(loads.rows_once_per_host * tokens, once)


@given(st.integers(0, 2**32 - 1))
def test_a_pair_goes_to_a_copy_with_the_lowest_price(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, size, layers, copies = 4, 5, 2, 3
    homes = np.full((layers, size, copies), -1, dtype=np.int16)
    for layer in range(layers):
        for expert in range(size):
            held = rng.permutation(ranks)[: rng.integers(1, copies + 1)]
            homes[layer, expert, : len(held)] = np.sort(held)
    prices = rng.choice([1.0, 1.0, 4.0], (ranks, ranks))
    np.fill_diagonal(prices, 0.0)
    experts = rng.integers(0, size, (9, layers, 2)).astype(np.int16)
    own = rng.integers(0, ranks, (9, layers)).astype(np.int16)
    found = hosts(experts, homes, own, prices)
    for (token, layer, slot), server in np.ndenumerate(found):
        copies_of = [int(one) for one in homes[layer, experts[token, layer, slot]] if one >= 0]
        rank = int(own[token, layer])
        cheapest = [s for s in copies_of if prices[rank, s] == min(prices[rank, copies_of])]
        assert server == cheapest[token % len(cheapest)]
    alike = 1.0 - np.eye(ranks)
    assert (hosts(experts, homes, own, alike) == hosts(experts, homes, own)).all()


def test_a_worker_that_is_no_rank_has_no_own_server() -> None:
    """One worker on host 1. Servers 0 and 1 are on host 0, and server 2 is on host 1."""
    there = HostMap(np.ones((1, 3)), np.array([1]), np.array([0, 0, 1]), 2, workers_are_ranks=False)
    found, own = np.array([[[0, 1, 1, 2]]], dtype=np.int16), np.array([[0]], dtype=np.int16)
    loads = link_loads(found, own, there)
    assert (loads.pairs[1, 0], loads.rows[1, 0], loads.rows_once_per_host[1, 0]) == (3, 2, 1)
    assert (loads.pairs[1, 1], loads.rows[1, 1]) == (1, 1)
    assert loads.pairs.sum() == 4
    assert not there.alike


@pytest.mark.parametrize(("k", "rows", "once", "answers"), [(8, 2.63, 1.00, 4.0), (2, 0.94, 0.75, 1.0)])
def test_what_a_row_for_each_host_would_save(k: int, rows: float, once: float, answers: float) -> None:
    """Two lines of the table of docs/cluster.md, by counting tokens on rank 0 of 8 ranks on 2 hosts."""
    found = np.random.default_rng(0).integers(0, 8, (20_000, 1, k)).astype(np.int16)
    loads = link_loads(found, np.zeros((20_000, 1), dtype=np.int16), ranks_on([0] * 4 + [1] * 4, 2))
    measured = loads.rows[0, 1], loads.rows_once_per_host[0, 1], loads.pairs[0, 1]
    assert measured == pytest.approx((rows, once, answers), abs=0.02)
