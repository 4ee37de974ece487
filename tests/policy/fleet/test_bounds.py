"""Numbers of processes: what is refused is out of bounds, and what is allowed is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.fleet.bounds import (
    FIRST_PROCESS_FILES,
    MORE_PROCESS_FILES,
    ROLES,
    SERVERS,
    Room,
    find_bound,
    find_excess,
)

SIZES = {SERVERS: 2, "attention_workers": 10, "prefill_workers": 10}
COUNTS = st.fixed_dictionaries({role: st.integers(0, 12) for role in ROLES})
ROOMS = st.builds(
    Room,
    expert_copies=st.none() | st.integers(1, 12),
    memory=st.none() | st.integers(0, 200),
    process_bytes=st.just(SIZES),
    files=st.none() | st.integers(0, 200),
    ports=st.none() | st.integers(0, 12),
    processes_of_unit=st.just({}) | st.just({"attention_workers": 2, "prefill_workers": 2}),
)


def holds(counts: Mapping[str, int], now: Mapping[str, int], room: Room) -> bool:
    """Whether the processes have room: the slow and obvious way. Numbers that shrink are no question."""
    unit = room.processes_of_unit
    larger = {role: max(counts[role], now[role]) for role in ROLES}
    if counts[SERVERS] > now[SERVERS]:
        for most in (room.expert_copies, room.ports):
            if most is not None and counts[SERVERS] > most:
                return False
    if all(counts[role] <= now[role] for role in ROLES):
        return True
    added = sum((larger[role] - now[role]) * SIZES[role] * unit.get(role, 1) for role in ROLES)
    if room.memory is not None and added > room.memory:
        return False
    processes = sum(larger[role] * unit.get(role, 1) for role in ROLES)
    return room.files is None or FIRST_PROCESS_FILES + MORE_PROCESS_FILES * (processes - 1) <= room.files


@given(COUNTS, COUNTS, ROOMS)
def test_exactly_what_has_no_room_is_refused(counts: dict[str, int], now: dict[str, int], room: Room) -> None:
    assert (find_excess(counts, now, room) is None) == holds(counts, now, room)


@given(COUNTS, COUNTS, ROOMS)
def test_the_number_that_is_named_is_the_largest_that_is_allowed(
    counts: dict[str, int], now: dict[str, int], room: Room
) -> None:
    excess = find_excess(counts, now, room)
    if excess is None:
        return
    assert now[excess.role] <= excess.bound.maximum < excess.count == counts[excess.role]
    assert find_bound(excess.role, counts, now, room) == excess.bound
    least = {**now, excess.role: excess.bound.maximum + 1}
    other_roles = [role for role in ROLES if role != excess.role]
    if all(counts[role] <= now[role] for role in other_roles):
        assert find_excess(least, now, room) is not None
        assert find_excess({**now, excess.role: excess.bound.maximum}, now, room) is None
    assert excess.bound.describe().startswith(f"at most {excess.bound.maximum}: ")


@given(COUNTS, ROOMS)
def test_nobody_is_kept_from_removing_processes(now: dict[str, int], room: Room) -> None:
    assert find_excess(dict.fromkeys(ROLES, 0), now, room) is None
    assert find_excess(now, now, room) is None


def test_what_bounds_is_named() -> None:
    counts, now = {SERVERS: 1000}, {SERVERS: 2}
    for room, words in (
        (Room(expert_copies=24), "at most 24: a layer has 24 copies of experts"),
        (Room(memory=160 << 20), "at most 12: each takes 16 MiB, and this host has 160 MiB left"),
        (Room(files=256), "at most 53: this process may open 256 files; raise that with ulimit -n"),
        (Room(ports=3), "at most 3: this host has 3 ports on which they could listen"),
    ):
        excess = find_excess(counts, now, room)
        assert excess is not None and excess.bound.describe() == words
    assert find_excess(counts, now, Room()) is None
    both = find_excess({SERVERS: 3, "attention_workers": 99}, now, Room(memory=1 << 30))
    assert both is not None and both.role == "attention_workers", "the one that adds most is named"
    assert find_excess({SERVERS: 25}, {SERVERS: 30}, replace(Room(), expert_copies=24)) is None
