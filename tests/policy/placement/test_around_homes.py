from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.placement import Placement
from moesaic.policy.placement.around_homes import place
from moesaic.policy.placement.balance import server_loads

HOMES = Placement(3, 4, {0: {0: [0, 1], 1: [2, 3]}}, "model", "tables.npz")
EQUAL = {0: 1.0, 1: 1.0}


def held(placement: Placement, layer: int = 0) -> dict[int, tuple[int, ...]]:
    return {server: tuple(experts) for server, experts in placement.experts_by_layer[layer].items()}


def test_worked_example() -> None:
    found = place(HOMES, np.array([[8, 1, 2, 2]]), [0], EQUAL, redundant=1)
    assert held(found) == {0: (0, 1), 1: (0, 2, 3)}
    assert server_loads(np.array([[8, 1, 2, 2]]), found, [0, 1]).tolist() == [[5, 8]]
    assert (found.version, found.model, found.tables) == (3, "model", "tables.npz")


def test_without_copies_it_is_the_file() -> None:
    assert place(HOMES, np.ones((1, 4)), [0], EQUAL) == HOMES


def test_copies_follow_the_load_and_homes_stay() -> None:
    before = place(HOMES, np.array([[8, 1, 2, 2]]), [0], EQUAL, redundant=1)
    after = place(HOMES, np.array([[1, 1, 2, 9]]), [0], EQUAL, redundant=1, previous=before)
    assert held(after) == {0: (0, 1, 3), 1: (2, 3)} and after.version == 4


def test_copies_stay_where_another_place_is_hardly_better() -> None:
    before = place(HOMES, np.array([[10, 1, 4, 4]]), [0], EQUAL, redundant=1)
    assert place(HOMES, np.array([[10, 1, 4.1, 4]]), [0], EQUAL, redundant=1, previous=before) is before


def test_a_larger_server_gets_the_copies_that_are_promised() -> None:
    servers = {0: 1.0, 1: 1.0, 2: 4.0}
    found = place(HOMES, np.ones((1, 4)), [0], servers, min_replicas=2)
    assert held(found)[2] == (0, 1, 2, 3)


@given(st.data())
def test_promises(data: st.DataObject) -> None:
    servers, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    least, redundant = data.draw(st.integers(1, servers)), data.draw(st.integers(0, 12))
    layers = [1, 4]
    owner = {layer: rng.integers(servers, size=experts) for layer in layers}
    homes = Placement(
        0,
        experts,
        {layer: {s: np.flatnonzero(owner[layer] == s).tolist() for s in range(servers)} for layer in layers},
    )
    weights = {server: float(rng.integers(1, 4)) for server in range(servers)}
    previous = None
    for _ in range(3):
        load = rng.integers(0, 20, size=(2, experts)) * rng.integers(0, 2)
        new = place(homes, load, layers, weights, redundant, least, previous)
        for layer in layers:
            copies = new.replicas(layer)
            assert copies.min() >= least
            most = max(experts + redundant, experts * least)
            assert copies.sum() <= min(most, experts * servers)
            assert copies.sum() >= min(most, experts * servers) - (servers - 1), "rounding of shares"
            for server in range(servers):
                assert set(homes.experts_of(server, layer)) <= set(new.experts_of(server, layer))
        assert previous is None or new is previous or new.version == previous.version + 1
        previous = new


@pytest.mark.parametrize("redundant", [3, 100])
def test_every_place_is_used_where_there_are_as_many_copies(redundant: int) -> None:
    found = place(HOMES, np.array([[8, 1, 2, 2]]), [0], EQUAL, redundant=redundant)
    assert found.replicas(0).sum() == min(4 + redundant, 8)
