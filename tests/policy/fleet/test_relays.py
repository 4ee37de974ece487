from __future__ import annotations

import pytest

from moesaic.core.paced_devices import LinkModel
from moesaic.core.topology import Way
from moesaic.policy.fleet import relays
from moesaic.policy.fleet.relays import HOP, REST, Resting, Share

ROW = 16384
"""Bytes of a row of 4096 numbers."""


def way(gb_per_s: float, host: str = "b", inside: float = 10.0, near: bool = False) -> Way:
    return Way(LinkModel(1e-4, gb_per_s * 1e9), near, host, LinkModel(5e-6, inside * 1e9))


def spread(rows: int, servers: int = 4, pairs: int = 2) -> list[Share]:
    """Each row needs all of the servers, with so many pairs on each."""
    return [Share(server, pairs * rows, rows) for server in range(servers)]


def test_the_relay_passes_on_the_fewest_pairs() -> None:
    assert relays.relay_of([Share(3, 5, 5), Share(1, 9, 7), Share(2, 9, 9)]) == 1
    assert relays.relay_of([Share(3, 5, 5), Share(2, 5, 5)]) == 2


def test_worked_example() -> None:
    """Three servers need one row, and one of them another one too."""
    shares = [Share(1, 2, 2), Share(2, 1, 1), Share(3, 2, 1)]
    assert relays.saved_bytes(shares, 2, 100, summed=False) == 200
    assert relays.saved_bytes(shares, 2, 100, summed=True) == 400
    assert relays.relay_of(shares) == 1
    assert relays.passed_bytes(shares, 100, partial=False) == 100 * (2 + 3), "two rows, three answers"
    assert relays.passed_bytes(shares, 100, partial=True) == 100 * (2 + 2)


@pytest.mark.parametrize(
    ("gb_per_s", "rows", "sums", "wanted"),
    [
        (1.25, 1, False, False),  # 49 KB take 39 us, and two hops take 410 us
        (1.25, 16, False, False),  # 629 us against 410 us, and 236 us for what is passed on
        (1.25, 64, False, True),  # 2517 us against 410 us and 944 us
        (0.125, 1, False, False),  # 393 us against 425 us
        (0.125, 2, False, True),
        (0.125, 1, True, True),
        (12.5, 64, False, False),  # a link as fast as the one inside
    ],
)
def test_where_it_pays(gb_per_s: float, rows: int, sums: bool, wanted: bool) -> None:
    assert HOP == 200e-6
    assert relays.pays(spread(rows), rows, ROW, sums, sums, way(gb_per_s)) == wanted


def test_rows_that_no_two_servers_need_save_nothing() -> None:
    shares = [Share(0, 4, 4), Share(1, 4, 4)]
    assert relays.saved_bytes(shares, 8, ROW, summed=True) == 0
    assert not relays.pays(shares, 8, ROW, True, True, way(1e-6))


def test_only_hosts_with_several_servers_count() -> None:
    near, here, there = way(9, "a", near=True), way(1, "b"), way(1, "c")
    ways = {0: near, 1: near, 2: here, 3: there, 4: here, 5: there, 6: way(1, "d")}
    assert relays.by_host(range(8), ways) == [[2, 4], [3, 5]]
    assert relays.by_host([6, 5, 2, 3], ways) == [[3, 5]]
    assert relays.by_host(range(8), {}) == []


def test_a_host_rests_for_a_while() -> None:
    resting = Resting()
    assert not resting.rests("b", 0.0)
    resting.begin("b", 7.0)
    assert resting.rests("b", 7.0 + 0.9 * REST) and not resting.rests("c", 7.0)
    assert not resting.rests("b", 7.0 + REST)
