"""What the status tells of a placement: who holds what, and how often each expert is there."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.report import layer_replicas, process_status
from moesaic.commands.processes import as_lines
from moesaic.core.placement import Placement, ranges

PLACEMENT = Placement(0, 6, {1: {0: [0, 1, 2, 5], 1: [3, 4]}, 2: {1: [0, 1, 2, 3, 4, 5], 2: [2, 4]}})


@pytest.mark.parametrize(
    ("numbers", "text"), [([4], "4"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"), (range(24), "0-23")]
)
def test_numbers_in_short(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def server(number: int, stage: Stage = Stage.SERVING) -> Member:
    return Member(Role.SERVER, number, stage=stage, capacity=2.0)


def test_of_each_server_what_it_holds() -> None:
    held = [process_status(server(number), PLACEMENT, 0.0).held for number in range(4)]
    assert held == [{1: "0-2, 5"}, {1: "3-4", 2: "0-5"}, {2: "2, 4"}, {}]
    assert process_status(server(0), PLACEMENT, 0.0).capacity == 2.0
    assert process_status(server(0), None, 0.0).held == {}
    assert process_status(Member(Role.WORKER, 0), PLACEMENT, 0.0).held == {}


def test_people_see_capacities_that_differ() -> None:
    def told(*capacities: float) -> str:
        members = [Member(Role.SERVER, number, capacity=weight) for number, weight in enumerate(capacities)]
        shown = [asdict(process_status(member, PLACEMENT, 0.0)) for member in members]
        rest = {"replicas": [], "transport": "shm", "dispatch": "x", "join_address": None, "watched": True}
        rest |= {"hosts": [], "links": []}
        rest |= {"paced": None, "placement_solve": None}
        return as_lines({"processes": shown, **rest})[0]

    assert "capacity" not in told(2.0, 2.0)
    first, *rows = told(2.0, 0.5).splitlines()
    assert "capacity" in first and [row.split()[:3] for row in rows] == [
        ["expert", "server", "0"],
        ["expert", "server", "1"],
    ]
    assert " 0.5 " in rows[1]


def test_of_each_expert_how_many_copies_serve() -> None:
    every = layer_replicas(PLACEMENT, [server(0), server(1), server(2)])
    assert [layer.copies for layer in every] == [{1: "0-5"}, {1: "0-1, 3, 5", 2: "2, 4"}]
    without = layer_replicas(PLACEMENT, [server(0), server(1, Stage.WAITING), server(2)])
    assert [layer.copies for layer in without] == [{0: "3-4", 1: "0-2, 5"}, {0: "0-1, 3, 5", 1: "2, 4"}]
    assert without[0].missing == [3, 4] and without[1].single == [2, 4]


def test_how_many_experts_have_their_copies_on_one_host() -> None:
    placement = Placement(0, 4, {1: {0: [0, 1], 1: [0, 2], 2: [1, 2, 3]}})
    servers, hosts = [server(0), server(1), server(2)], {0: "", 1: "", 2: "10.0.0.2"}
    assert [layer.one_host for layer in layer_replicas(placement, servers, hosts)] == [1]
    assert [layer.one_host for layer in layer_replicas(placement, servers)] == [0], "there is one host only"
    gone = [server(0), server(1), server(2, Stage.WAITING)]
    assert [layer.one_host for layer in layer_replicas(placement, gone, hosts)] == [0]
    assert layer_replicas(None, servers, hosts) == []


def test_people_see_it() -> None:
    rest: dict[str, object] = {
        "processes": [],
        "transport": "shm",
        "dispatch": "x",
        "join_address": None,
        "watched": True,
    }
    rest |= {"hosts": [], "links": [], "paced": None, "placement_solve": None}
    layer = {"single": [], "missing": [], "one_host": 3}
    told = "\n".join(as_lines({"replicas": [layer, layer], **rest}))
    assert "6 experts have all of their copies on one host" in told
    assert "on one host" not in "\n".join(as_lines({"replicas": [{**layer, "one_host": 0}], **rest}))
