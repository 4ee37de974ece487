"""How a simulated worker divides pairs among servers."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.planning.sim.client import by_server
from moesaic.policy.fleet.replicas import Replicas


def test_worked_example() -> None:
    pairs, experts = np.arange(4), np.array([7, 6, 1, 7])
    found = by_server(np.array([5, 5, 3, 5]), pairs, experts, 2)
    assert [(one.server, one.pairs.tolist(), one.experts.tolist(), one.rows) for one in found] == [
        (3, [2], [1], 1),
        (5, [0, 1, 3], [7, 6, 7], 2),
    ]
    assert by_server(np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), 2) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_same_shares_as_a_real_worker(seed: int) -> None:
    """Server by server, with the masks that `RemoteExperts` uses; server 2 is not connected."""
    rng = np.random.default_rng(seed)
    subject = Replicas()
    subject.place({server: {0: range(2 * server, 2 * server + 2)} for server in range(4)}, 8)
    for server in (0, 1, 3):
        subject.add_server(server)
    experts, pairs = rng.integers(0, 8, 30), np.sort(rng.choice(60, 30, replace=False))
    found = by_server(subject.route(0, experts), pairs, experts, 3)
    wanted = subject.shares(0, experts)
    assert [one.server for one in found] == [server for server, _ in wanted]
    for one, (_, mask) in zip(found, wanted, strict=True):
        assert one.pairs.tolist() == pairs[mask].tolist()
        assert one.experts.tolist() == experts[mask].tolist()
        assert one.rows == len(np.unique(pairs[mask] // 3))
