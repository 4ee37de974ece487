"""When the barrier of an expert server opens."""

from __future__ import annotations

from moesaic.policy.scheduling.step_barrier import StepBarrier


def barrier(*clients: int) -> StepBarrier:
    made = StepBarrier()
    for client in clients:
        made.add_client(client)
    return made


def test_it_opens_once_all_have_arrived_and_one_has_work() -> None:
    gate = barrier(0, 1)
    assert gate.record_arrival(0, 5, work=True, step=1) == []
    assert gate.record_arrival(1, 6, work=False, step=1) == [5, 6]
    assert gate.record_arrival(1, 7, work=True, step=2) == []
    assert gate.record_arrival(0, 8, work=True, step=2) == [8, 7]


def test_it_stays_shut_while_nobody_has_work() -> None:
    gate = barrier(0, 1)
    assert gate.record_arrival(0, 5, work=False, step=1) == []
    assert gate.record_arrival(1, 6, work=False, step=1) == []
    assert gate.record_arrival(0, 7, work=True, step=1) == [5, 7, 6]


def test_who_leaves_is_not_waited_for() -> None:
    gate = barrier(0, 1)
    assert gate.record_arrival(0, 5, work=True, step=1) == []
    assert gate.remove_client(1) == [5]
    gate.add_client(2)
    assert gate.record_arrival(0, 6, work=True, step=2) == []
    assert gate.remove_client(7) == []


def test_a_step_begins_once() -> None:
    gate = barrier(0, 1)
    gate.record_arrival(0, 5, work=False, step=1)
    assert not gate.has_begun_step(1)
    assert gate.record_arrival(1, 6, work=True, step=1) == [5, 6]
    assert gate.has_begun_step(1) and not gate.has_begun_step(2)


def test_a_new_barrier_takes_the_number_from_those_who_arrive() -> None:
    gate = barrier(0, 1)
    assert gate.record_arrival(0, 5, work=True, step=40) == []
    assert gate.has_begun_step(39) and not gate.has_begun_step(40)
    assert gate.record_arrival(1, 6, work=False, step=40) == [5, 6] and gate.step == 41


def test_it_opens_when_somebody_who_arrived_computes() -> None:
    gate = barrier(0, 1, 2)
    assert (
        gate.record_arrival(0, 5, work=False, step=1) == gate.record_arrival(1, 6, work=False, step=1) == []
    )
    assert gate.record_computing(2) == [], "it has not arrived, and may be in the step before"
    assert gate.record_computing(1) == [5, 6]
    assert gate.has_begun_step(1) and gate.record_computing(1) == []
