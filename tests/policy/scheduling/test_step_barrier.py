"""When the barrier of an expert server opens."""

from __future__ import annotations

from moesaic.policy.scheduling.step_barrier import StepBarrier


def barrier(*clients: int) -> StepBarrier:
    made = StepBarrier()
    for client in clients:
        made.joined(client)
    return made


def test_it_opens_once_all_have_arrived_and_one_has_work() -> None:
    gate = barrier(0, 1)
    assert gate.arrived(0, 5, work=True) == []
    assert gate.arrived(1, 6, work=False) == [5, 6]
    assert gate.arrived(1, 7, work=True) == []  # the next step
    assert gate.arrived(0, 8, work=True) == [8, 7]


def test_it_stays_shut_while_nobody_has_work() -> None:
    gate = barrier(0, 1)
    assert gate.arrived(0, 5, work=False) == [] == gate.arrived(1, 6, work=False)
    assert gate.arrived(0, 7, work=True) == [5, 7, 6]


def test_who_leaves_is_not_waited_for() -> None:
    gate = barrier(0, 1)
    assert gate.arrived(0, 5, work=True) == []
    assert gate.left(1) == [5]
    gate.joined(2)
    assert gate.arrived(0, 6, work=True) == []
    assert gate.left(7) == []
