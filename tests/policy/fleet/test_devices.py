from __future__ import annotations

from moesaic.policy.fleet.devices import Devices, choose, count_sharing

FOUR = ("0", "1", "2", "3")


def test_processes_take_devices_in_turn() -> None:
    taken: list[Devices] = []
    for _ in range(6):
        taken.append(choose(FOUR, taken))
    assert taken == [("0",), ("1",), ("2",), ("3",), ("0",), ("1",)]


def test_groups_take_neighbours() -> None:
    first = choose(FOUR, [], 2)
    assert first == ("0", "1") and choose(FOUR, [first], 2) == ("2", "3")
    assert choose(FOUR, [], 8) == FOUR, "ranks share them"


def test_a_new_process_takes_the_place_of_one_that_left() -> None:
    assert choose(FOUR, [("0",), ("2",), ("3",)]) == ("1",)
    assert choose(("6", "4"), [("6",)]) == ("4",), "the order is the user's"


def test_no_device_for_anybody_where_there_is_none() -> None:
    assert choose((), [], 2) == ()


def test_who_shares_a_device() -> None:
    assert count_sharing(("0", "1"), [("1",), ("2",), ()]) == 1
    assert count_sharing((), [("1",)]) == 0
