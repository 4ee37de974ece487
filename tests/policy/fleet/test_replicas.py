from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.paced_devices import LinkModel
from moesaic.core.topology import Way
from moesaic.policy.fleet.replicas import NO_SERVER, Replicas, ReplicaStats, ReplicaTimeout

PATIENCE = ReplicaTimeout(factor=10.0, floor=0.5, ceiling=1e9, unmeasured_seconds=3.0)
BOTH = {0: {5: [0, 1]}, 1: {5: [0, 1]}}
"""Two servers that hold both experts of layer 5."""


def replicas(
    placement: Mapping[int, Mapping[int, Iterable[int]]],
    experts: int = 4,
    own: int | None = None,
    connected: Iterable[int] | None = None,
    patience: ReplicaTimeout | None = PATIENCE,
) -> Replicas:
    subject = Replicas(patience, own)
    subject.place(placement, experts)
    for server in placement if connected is None else connected:
        subject.add_server(server)
    return subject


def route(subject: Replicas, experts: list[int], layer: int = 5) -> list[int]:
    servers: list[int] = subject.route(layer, np.array(experts, dtype=np.int64)).tolist()
    return servers


# ---- choice


def test_worked_example() -> None:
    """The example of `route`: all pairs of expert 3 go to the holder with fewer pairs outstanding."""
    subject = replicas({0: {5: [3]}, 1: {5: [3]}, 2: {5: [0, 1, 2]}})
    subject.record_sent(0, 10, now=0.0)
    assert route(subject, [3, 3, 3]) == [1, 1, 1]
    assert route(subject, [3, 0, 3]) == [1, 2, 1]


def test_replicas_of_several_experts_share_the_pairs() -> None:
    """The expert with most pairs is placed first. Expert 0 with four pairs goes to server 0, then 1 and 2 to
    server 1."""
    subject = replicas({0: {5: [0, 1, 2]}, 1: {5: [0, 1, 2]}})
    assert route(subject, [1, 1, 0, 0, 0, 0, 2]) == [1, 1, 0, 0, 0, 0, 1]


def test_the_own_ranks_server_comes_first_whatever_its_load() -> None:
    subject = replicas({0: {5: [0, 1]}, 1: {5: [0]}}, own=1)
    subject.record_sent(1, 1000, now=0.0)
    assert route(subject, [0, 1, 0]) == [1, 0, 1]
    subject.remove_server(1, 1000)
    assert route(subject, [0, 1, 0]) == [0, 0, 0]


def test_an_expert_without_a_connected_holder_goes_to_nobody() -> None:
    subject = replicas({0: {5: [0]}, 1: {5: [1], 6: [0]}}, connected=[0])
    assert route(subject, [0, 1, 2]) == [0, NO_SERVER, NO_SERVER]
    assert route(subject, [0], layer=6) == [NO_SERVER]
    assert route(subject, [0, 1], layer=99) == [NO_SERVER, NO_SERVER]
    assert route(subject, []) == []
    subject.add_server(1)
    assert route(subject, [0, 1, 2]) == [0, 1, NO_SERVER]
    assert subject.connected_servers == {0, 1}


def test_a_new_placement_replaces_the_old_one_whole() -> None:
    subject = replicas(BOTH)
    subject.place({1: {7: [2]}}, 4)
    assert route(subject, [0, 1]) == [NO_SERVER, NO_SERVER]
    assert route(subject, [2, 2], layer=7) == [1, 1]


def test_an_expert_that_is_named_twice_has_one_holder() -> None:
    subject = replicas({0: {5: [1, 1]}}, connected=[0])
    assert route(subject, [1, 1]) == [0, 0]


@given(st.data())
def test_every_pair_goes_to_a_connected_holder(data: st.DataObject) -> None:
    holders = st.lists(st.integers(0, 5), unique=True)
    placement = {server: {5: data.draw(holders)} for server in range(4)}
    connected = data.draw(st.sets(st.integers(0, 3)))
    subject = replicas(
        placement, 6, own=data.draw(st.one_of(st.none(), st.integers(0, 3))), connected=connected
    )
    for server in connected:
        subject.record_sent(server, data.draw(st.integers(0, 9)), now=0.0)
    experts = data.draw(st.lists(st.integers(0, 5), max_size=12))
    chosen = route(subject, experts)
    for expert, server in zip(experts, chosen, strict=True):
        possible = {one for one in connected if expert in placement[one][5]}
        assert server in possible or (server == NO_SERVER and not possible)
    assert len(set(zip(experts, chosen, strict=True))) == len(set(experts)), "an expert's pairs are split"
    assert route(subject, experts) == chosen, "asking changes nothing"


# ---- patience


def test_a_server_whose_pace_is_unknown_gets_its_time() -> None:
    subject = replicas(BOTH)
    assert subject.next_deadline() is None and subject.late(1e9) == []
    subject.record_sent(0, 4, now=10.0)
    assert subject.next_deadline() == 13.0
    assert subject.late(13.0) == [] and subject.late(13.1) == [0]


def test_patience_is_a_multiple_of_what_the_work_should_take() -> None:
    """At 0.5 seconds a pair, 4 pairs should take 2 s, so 20 s are allowed. At 0.01 s a pair the floor
    applies."""
    subject = replicas(BOTH)
    subject.record_sent(0, 2, now=0.0)
    subject.record_answer(0, 2, now=1.0)
    subject.record_sent(0, 4, now=5.0)
    assert subject.late(25.0) == [] and subject.late(25.1) == [0]
    subject.record_sent(1, 100, now=0.0)
    subject.record_answer(1, 99, now=0.99)
    assert subject.next_deadline() == pytest.approx(0.99 + PATIENCE.floor)


def silence(subject: Replicas, pairs: int, now: float = 100.0) -> float:
    """The seconds that server 0 may be silent after `pairs` pairs were sent at `now`."""
    subject.record_sent(0, pairs, now)
    deadline = subject.next_deadline()
    assert deadline is not None
    return deadline - now


@pytest.mark.parametrize("pairs", [1, 64, 16_384])
def test_a_freeze_costs_less_than_a_second_whatever_is_outstanding(pairs: int) -> None:
    """At 0.2 ms a pair, 16,384 pairs of prefill should take 3.3 s. 20 times that is more than a minute."""
    subject = replicas(BOTH, patience=None)
    subject.record_sent(0, 100, now=0.0)
    subject.record_answer(0, 100, now=0.02)
    assert silence(subject, pairs) <= 0.6 + 1e-9
    assert silence(replicas(BOTH, patience=None), pairs) <= 0.8 + 1e-9, "that never answered"


def answered(subject: Replicas, seconds: float, now: float) -> None:
    """Server 0 answers 64 pairs that many seconds after they were sent, at `now`."""
    subject.record_sent(0, 64, now - seconds)
    subject.record_answer(0, 64, now)


def test_the_least_timeout_is_ten_times_the_longest_round_trip() -> None:
    for trips, expected in (([0.001], 0.05), ([0.001, 0.012, 0.001], 0.12), ([0.1, 0.001], 0.3)):
        subject = replicas(BOTH, patience=None)
        for second, seconds in enumerate(trips):
            answered(subject, seconds, 1.0 + second)
        assert silence(subject, 1) == pytest.approx(expected), trips


def test_a_long_round_trip_counts_for_thirty_to_sixty_seconds() -> None:
    for later, expected in ((59.0, 0.12), (61.0, 0.05)):
        subject = replicas(BOTH, patience=None)
        answered(subject, 0.012, 1.0)
        for second in (later - 30, later):
            answered(subject, 0.001, 1.0 + second)
        subject.record_sent(0, 1, 2.0 + later)
        deadline = subject.next_deadline()
        assert deadline is not None
        assert deadline - 2.0 - later == pytest.approx(expected)


def test_a_server_that_was_given_up_too_early_lengthens_the_timeout() -> None:
    subject = replicas(BOTH, patience=None)
    answered(subject, 0.001, 1.0)
    subject.record_sent(0, 1, 2.0)
    assert subject.late(2.06) == [0]
    subject.mask(0)
    subject.remove_server(0)
    subject.add_server(0)
    answered(subject, 0.001, 3.0)
    assert silence(subject, 1, 4.0) == pytest.approx(0.3)


def test_a_set_floor_is_taken_as_it_is() -> None:
    subject = replicas(BOTH, patience=ReplicaTimeout(floor=0.9))
    answered(subject, 0.001, 1.0)
    assert silence(subject, 1, 1.0) == pytest.approx(0.9), "also above the ceiling"


def test_a_server_that_honestly_needs_long_is_not_given_up_for_ever() -> None:
    """A run takes ten seconds and begins again each time that its server is given up. That happens at most
    four times."""
    subject, now, tries = replicas(BOTH, patience=None), 0.0, 0
    while (allowed := silence(subject, 64, now)) < 10.0 and tries < 20:
        now += allowed + 0.01
        assert subject.late(now) == [0]
        subject.mask(0)
        subject.remove_server(0)
        subject.add_server(0)
        tries += 1
    assert tries == 4, "0.8, 1.6, 3.2, 6.4"
    assert subject.stats == ReplicaStats(failovers=4, silent_failovers=4, false_failovers=4)
    subject.record_answer(0, 64, now + 10.0)
    assert silence(subject, 64, now + 10.0) == pytest.approx(20.0), "it has earned that"


def test_a_long_silence_wears_off_with_quick_answers() -> None:
    subject = replicas(BOTH, patience=None)
    subject.record_sent(0, 64, now=0.0)
    subject.record_answer(0, 64, now=5.0)
    assert silence(subject, 64, 10.0) == pytest.approx(10.0)
    subject.record_answer(0, 64, 10.01)
    for step in range(150):
        subject.record_sent(0, 1, 20.0 + step)
        subject.record_answer(0, 1, 20.01 + step)
    assert silence(subject, 16_384, 1000.0) == pytest.approx(0.6)


def test_patience_with_a_process_is_not_inherited_by_its_successor() -> None:
    subject = replicas(BOTH, patience=None)
    subject.record_sent(0, 64, now=0.0)
    subject.record_answer(0, 64, now=5.0)
    subject.record_replacement(0)
    subject.remove_server(0)
    subject.add_server(0)
    assert silence(subject, 64) == pytest.approx(0.8)


def test_every_answer_is_a_sign_of_life() -> None:
    subject = replicas(BOTH)
    subject.record_sent(0, 10, now=0.0)
    subject.record_answer(0, 1, now=2.0)  # 2 seconds a pair: 9 more may take 180
    assert subject.late(181.0) == [] and subject.late(182.1) == [0]
    subject.record_answer(0, 0, now=182.0)
    assert subject.late(182.1) == [0], "no pair, no progress"


def test_more_work_does_not_restart_the_clock() -> None:
    """A frozen server is late even if it is sent more and more pairs."""
    subject = replicas(BOTH)
    for now in range(4):
        subject.record_sent(0, 1, now=float(now))
    assert subject.late(3.5) == [0]


def test_idle_time_does_not_count() -> None:
    subject = replicas(BOTH)
    subject.record_sent(0, 1, now=0.0)
    subject.record_answer(0, 1, now=0.01)
    subject.record_sent(0, 1, now=100.0)
    assert subject.late(100.4) == [] and subject.late(100.6) == [0]


def test_a_slow_answer_counts_at_once_and_quick_ones_little_by_little() -> None:
    subject = replicas(BOTH)
    now = 0.0
    for seconds in (0.01, 1.0, 0.01):
        subject.record_sent(0, 1, now)
        now += seconds
        subject.record_answer(0, 1, now)
    subject.record_sent(0, 1, now)
    pace = 0.9 * 1.0 + 0.1 * 0.01
    assert subject.next_deadline() == pytest.approx(now + PATIENCE.factor * pace)


def test_only_a_server_whose_rows_others_could_take_is_late() -> None:
    """No other server holds expert 2 of server 0 until server 2 joins."""
    subject = replicas({0: {5: [0, 2]}, 1: {5: [0]}, 2: {5: [2]}}, connected=[0, 1])
    subject.record_sent(0, 1, now=0.0)
    assert subject.late(100.0) == []
    assert subject.next_deadline() is None, "nobody is woken for a server that cannot be gone around"
    subject.add_server(2)
    assert subject.late(100.0) == [0] and subject.next_deadline() == 3.0
    subject.remove_server(2)
    assert subject.late(100.0) == [] and subject.next_deadline() is None
    subject.place({0: {5: [0]}, 1: {5: [0]}}, 4)
    assert subject.late(100.0) == [0] and subject.next_deadline() == 3.0
    subject.place({0: {5: [0]}, 1: {6: [0]}}, 4)
    assert subject.late(100.0) == [] and subject.next_deadline() is None


def test_two_frozen_servers_are_not_given_up_for_each_other() -> None:
    """Both servers are late. Without server 0 no other server holds what server 1 holds."""
    subject = replicas(BOTH)
    subject.record_sent(0, 1, now=0.0)
    subject.record_sent(1, 1, now=0.0)
    assert subject.late(100.0) == [0]
    subject.mask(0)
    assert subject.late(100.0) == [] and subject.next_deadline() is None


# ---- counters


def test_a_death_with_rows_outstanding_is_a_failover() -> None:
    subject = replicas(BOTH)
    subject.remove_server(0, pairs=0)
    assert subject.stats == ReplicaStats()
    subject.record_sent(1, 3, now=0.0)
    subject.remove_server(1, pairs=3)
    subject.remove_server(1, pairs=3)  # known already
    assert subject.stats == ReplicaStats(failovers=1)
    assert subject.connected_servers == frozenset()


def test_a_masked_server_that_comes_back_was_a_false_failover() -> None:
    subject = replicas(BOTH)
    subject.mask(0)
    subject.remove_server(0, pairs=5)  # its connection is closed then: the same failover
    assert route(subject, [0]) == [1] and subject.stats == ReplicaStats(failovers=1, silent_failovers=1)
    subject.add_server(0)
    assert subject.stats == ReplicaStats(failovers=1, silent_failovers=1, false_failovers=1)
    subject.add_server(0)
    assert subject.stats.false_failovers == 1


def test_a_masked_server_whose_successor_comes_had_died() -> None:
    subject = replicas(BOTH)
    subject.mask(0)
    subject.record_replacement(0)
    subject.add_server(0)
    assert subject.stats == ReplicaStats(failovers=1, silent_failovers=1)


def test_a_new_connection_owes_nothing() -> None:
    subject = replicas(BOTH)
    subject.record_sent(0, 7, now=0.0)
    subject.remove_server(0, 7)
    subject.record_answer(0, 7, now=1.0)  # too late, and of nobody
    subject.add_server(0)
    assert subject.late(100.0) == [] and subject.next_deadline() is None
    assert route(subject, [0]) == [0]


def test_pairs_that_are_sent_again_are_counted() -> None:
    subject = replicas(BOTH)
    subject.record_sent(0, 3, now=0.0)
    subject.record_sent(1, 3, now=0.0, is_resend=True)
    subject.record_sent(1, 2, now=0.0, is_resend=True)
    assert subject.stats == ReplicaStats(resent_pairs=5)


# ---- suspicion by the supervisor


def test_a_suspected_server_is_named_once_if_others_hold_its_experts() -> None:
    subject = replicas(BOTH)
    subject.place(BOTH, 4, [0])
    assert subject.late(0.0) == [0]
    subject.mask(0)
    subject.place(BOTH, 4, [0])
    subject.add_server(0)
    assert subject.late(0.0) == [], "a client that reaches it again may use it"
    subject.place(BOTH, 4, [])
    subject.place(BOTH, 4, [0])
    assert subject.late(0.0) == [0], "this is another suspicion"


def test_the_only_holder_is_asked_while_it_is_suspected_and_named_once_it_left() -> None:
    """Example: a host with all copies of expert 0 is silent. Its rows wait there until it is given up."""
    subject = replicas({0: {5: [0]}, 1: {5: [1]}})
    subject.place({0: {5: [0]}, 1: {5: [1]}}, 4, [0])
    subject.record_sent(0, 3, now=0.0)
    assert subject.late(0.1) == [] and route(subject, [0, 1]) == [0, 1]
    subject.place({1: {5: [0, 1]}}, 4)
    assert subject.late(0.1) == [0], "however short it was silent"
    assert route(subject, [0, 1]) == [1, 1]


def test_a_server_that_is_trusted_again_stays() -> None:
    subject = replicas({0: {5: [0]}, 1: {5: [1]}})
    subject.place({0: {5: [0]}, 1: {5: [1]}}, 4, [0])
    assert subject.late(0.1) == []
    subject.place(BOTH, 4)
    assert subject.late(0.1) == []


# ---- links


NEAR, FAR = Way(LinkModel(5e-6, 20e9), on_one_host=True), Way(LinkModel(100e-6, 1e9), on_one_host=False)
SLOW = Way(LinkModel(100e-6, 1e8), on_one_host=False)


def on_links(ways: Mapping[int, Way], own: int | None = None) -> Replicas:
    """Servers that all hold both experts of layer 5."""
    subject = Replicas(PATIENCE, own, pair_bytes=1000)
    subject.place({server: {5: [0, 1]} for server in ways}, 4, ways=ways)
    for server in ways:
        subject.add_server(server)
    return subject


def test_a_holder_on_the_own_host_comes_first_whatever_its_load() -> None:
    subject = on_links({0: FAR, 1: NEAR, 2: NEAR})
    subject.record_sent(1, 1000, now=0.0)
    subject.record_sent(2, 2000, now=0.0)
    assert route(subject, [0, 0]) == [1, 1]
    subject.remove_server(1, 1000)
    subject.remove_server(2, 2000)
    assert route(subject, [0, 0]) == [0, 0]


def test_the_own_ranks_server_comes_before_others_of_the_host() -> None:
    assert route(on_links({0: NEAR, 1: NEAR}, own=1), [0]) == [1]


def test_far_holders_are_chosen_by_what_their_links_have_to_carry() -> None:
    """A pair takes 1 us on FAR and 10 us on SLOW. So SLOW is asked once FAR has nine times as many pairs."""
    subject = on_links({0: SLOW, 1: FAR})
    assert route(subject, [0] * 10) == [1] * 10
    subject.record_sent(1, 89, now=0.0)
    assert route(subject, [0] * 10) == [1] * 10
    subject.record_sent(1, 10, now=0.0)
    assert route(subject, [0] * 10) == [0] * 10


@given(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.lists(st.integers(0, 50), min_size=3))
def test_equal_links_choose_as_none(experts: list[int], loads: list[int]) -> None:
    """Whether all servers are near, or all are far, or nothing is known of links."""
    found = []
    for ways in ({}, dict.fromkeys(range(3), NEAR), dict.fromkeys(range(3), FAR)):
        subject = replicas({server: {5: [0, 1]} for server in range(3)})
        subject._pair_bytes = 1000
        subject.place({server: {5: [0, 1]} for server in range(3)}, 4, ways=ways)
        for server, load in enumerate(loads[:3]):
            subject.record_sent(server, load, now=0.0)
        found.append(route(subject, experts))
    assert found[0] == found[1] == found[2]


# ---- what is remembered between two questions


class Forgetful(Replicas):
    """Looks at every server each time."""

    def late(self, now: float) -> list[int]:
        self._calm_until = -np.inf
        return super().late(now)

    def next_deadline(self) -> float | None:
        self._none_spare = False
        return super().next_deadline()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sent", "answered", "taken", "lost", "joined", "mask", "late", "suspect"]),
        st.integers(0, 2),
        st.floats(0, 1),
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_nothing_that_is_remembered_changes_an_answer(
    steps: list[tuple[str, int, float]], copies: bool
) -> None:
    held = {server: {5: [0, 1, 2] if copies else [server]} for server in range(3)}
    both = Replicas(PATIENCE), Forgetful(PATIENCE)
    now, outstanding = 0.0, dict.fromkeys(range(3), 0)
    for one in both:
        one.place(held, 3)
        for server in held:
            one.add_server(server)
    for what, server, seconds in steps:
        now += seconds
        there = server in both[0].connected_servers
        if (what in ("answered", "taken") and not outstanding[server]) or (what == "sent" and not there):
            continue
        if what in ("lost", "mask", "joined"):
            outstanding[server] = 0
        outstanding[server] += {"sent": 2, "answered": -2, "taken": -2}.get(what, 0)
        for one in both:
            if what == "sent":
                one.record_sent(server, 2, now)
            elif what == "answered":
                one.record_answer(server, 2, now)
            elif what == "taken":
                one.record_taken_back(server, 2)
            elif what == "suspect":
                one.place(held, 3, suspected_servers=[server])
            elif what != "late":
                {"lost": one.remove_server, "mask": one.mask, "joined": one.add_server}[what](server)
        answers = [(one.late(now), one.next_deadline(), one.connected_servers, one.stats) for one in both]
        assert answers[0] == answers[1]


# ---- what is taken back


def test_soon_late() -> None:
    """Both servers were asked at 0 and have 3 seconds. One of them answers."""
    subject = replicas(BOTH, 2)
    subject.record_sent(0, 4, 0.0)
    subject.record_sent(1, 4, 0.0)
    assert subject.slow({0, 1}, 2.25) == [] and subject.next_slow({0, 1}) == 2.25
    assert subject.slow({0, 1}, 2.3) == [0, 1] and subject.slow({1, 7}, 2.3) == [1]
    subject.record_answer(1, 4, 1.0)
    assert subject.slow({0, 1}, 2.3) == [0]
    assert subject.next_slow({1}) is None
    subject.remove_server(1)
    assert subject.slow({0}, 9.0) == [], "nobody else has its experts"


def test_pairs_that_are_sent_again_keep_the_clock() -> None:
    subject = replicas(BOTH, 2)
    subject.record_sent(0, 4, 0.0)
    subject.record_sent(0, 4, 2.0, is_resend=True)
    subject.record_taken_back(0, 4)
    assert subject.late(2.9) == [] and subject.late(3.1) == [0]
    subject.record_taken_back(0, 4)
    subject.record_sent(0, 1, 5.0)
    assert subject.late(7.9) == [] and subject.late(8.1) == [0]
    subject.record_taken_back(9, 4)
