"""A client at the gate of a step, with connections that record what is posted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import ServerEntry
from moesaic.experts.barrier_client import Entrance
from moesaic.experts.outstanding import End

HIDDEN = 8


@dataclass
class Recording:
    """A Caller."""

    posted: list[Any] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    dead: bool = False

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Any:
        if self.dead:
            raise ConnectionLost("it is gone")
        return SimpleNamespace(number=len(self.posted), request=memoryview(bytearray(request_bytes)))

    def post(self, call: Any) -> None:
        self.posted.append(call)

    def release(self, call: Any) -> None:
        self.released.append(call.number)


def end(server: int = 0, incarnation: int = 1) -> tuple[End, Recording]:
    caller = Recording()
    return End(ServerEntry(server, incarnation, "unix:x"), caller), caller  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_it_knocks_once_at_every_server_and_is_let_in_by_one(first: int) -> None:
    made = [end(server) for server in range(3)]
    entrance = Entrance(HIDDEN)
    entrance.enter(True)
    for _ in range(3):
        entrance.knock([gate for gate, _ in made])
    assert [len(asked.posted) for _, asked in made] == [1, 1, 1]
    assert entrance.waiting and not entrance.entered()
    gate, asked = made[first]
    entrance.answered(gate, asked.posted[0])
    assert asked.released == [0]
    assert entrance.entered() and not entrance.waiting


def test_a_late_answer_does_not_let_it_into_the_next_step() -> None:
    """The second server's, to the knock with which the first one let it in."""
    (first, asked), (second, slow) = end(0), end(1)
    entrance = Entrance(HIDDEN)
    entrance.enter(True)
    entrance.knock([first, second])
    entrance.answered(first, asked.posted[0])
    assert entrance.entered()
    entrance.enter(True)
    entrance.knock([first, second])
    entrance.answered(second, slow.posted[0])
    assert slow.released == [0] and not entrance.entered()
    entrance.answered(second, slow.posted[1])
    assert entrance.entered()


def test_a_server_that_was_started_again_is_knocked_at_anew() -> None:
    """Its number is the same, and so are the numbers of its calls."""
    (before, lost), (after, asked) = end(0, 1), end(0, 2)
    entrance = Entrance(HIDDEN)
    entrance.enter(False)
    entrance.knock([before])
    entrance.knock([])
    entrance.knock([after])
    assert len(asked.posted) == 1
    entrance.answered(before, lost.posted[0])
    assert not entrance.entered(), "that knock is void"
    entrance.answered(after, asked.posted[0])
    assert entrance.entered()


def test_a_knock_before_work_came_is_void() -> None:
    gate, asked = end()
    entrance = Entrance(HIDDEN)
    entrance.enter(False)
    entrance.knock([gate])
    entrance.enter(True)
    entrance.knock([gate])
    entrance.answered(gate, asked.posted[0])
    assert not entrance.entered()
    entrance.answered(gate, asked.posted[1])
    assert entrance.entered()


@pytest.mark.parametrize("work", [False, True])
def test_who_waits_without_rows_is_idle(work: bool) -> None:
    entrance = Entrance(HIDDEN)
    assert not entrance.idle
    entrance.enter(work)
    assert entrance.idle is not work


def test_a_gate_that_dies_is_tried_again() -> None:
    gate, asked = end()
    entrance = Entrance(HIDDEN)
    entrance.enter(True)
    asked.dead = True
    entrance.knock([gate])
    asked.dead = False
    entrance.knock([gate])
    assert len(asked.posted) == 1


def test_an_answer_that_is_told_twice_is_released_once() -> None:
    gate, asked = end()
    entrance = Entrance(HIDDEN)
    entrance.enter(True)
    entrance.knock([gate])
    for _ in range(2):
        entrance.answered(gate, asked.posted[0])
    assert asked.released == [0]
