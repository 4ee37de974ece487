"""A client at the gate of a step, with connections that record what is posted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import ServerEntry
from moesaic.experts import wire
from moesaic.experts.barrier_client import BarrierClient
from moesaic.experts.outstanding import ServerConnection

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
        request, answer = memoryview(bytearray(request_bytes)), memoryview(bytearray(rows * row_bytes))
        return SimpleNamespace(number=len(self.posted), request=request, answer=answer)

    def post(self, call: Any) -> None:
        self.posted.append(call)

    def release(self, call: Any) -> None:
        self.released.append(call.number)


def answered(subject: BarrierClient, gate: ServerConnection, call: Any, step: int = 1) -> None:
    """The gate has opened for this step."""
    wire.write_step_begun(call.answer, step)
    subject.on_answer(gate, call)


def steps(asked: Recording) -> list[int]:
    """The step of each arrival."""
    return [wire.parse(call.request, 1, 1, HIDDEN).step for call in asked.posted]


def end(server: int = 0, incarnation: int = 1) -> tuple[ServerConnection, Recording]:
    caller = Recording()
    return ServerConnection(ServerEntry(server, incarnation, Endpoint("unix:x")), caller), caller  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_it_knocks_once_at_every_server_and_is_let_in_by_one(first: int) -> None:
    made = [end(server) for server in range(3)]
    barrier_client = BarrierClient(HIDDEN)
    barrier_client.enter(True)
    for _ in range(3):
        barrier_client.arrive([gate for gate, _ in made])
    assert [len(asked.posted) for _, asked in made] == [1, 1, 1]
    assert barrier_client.is_waiting and not barrier_client.poll()
    gate, asked = made[first]
    answered(barrier_client, gate, asked.posted[0])
    assert asked.released == [0]
    assert barrier_client.poll() and not barrier_client.is_waiting


def test_a_late_answer_does_not_let_it_into_the_next_step() -> None:
    """The second server's, to the arrival that passed the first one's barrier."""
    (first, asked), (second, slow) = end(0), end(1)
    barrier_client = BarrierClient(HIDDEN)
    barrier_client.enter(True)
    barrier_client.arrive([first, second])
    answered(barrier_client, first, asked.posted[0])
    assert barrier_client.poll()
    barrier_client.enter(True)
    barrier_client.arrive([first, second])
    answered(barrier_client, second, slow.posted[0])
    assert slow.released == [0] and not barrier_client.poll()
    answered(barrier_client, second, slow.posted[1], 2)
    assert barrier_client.poll() and steps(slow) == [1, 2]


def test_a_server_that_was_started_again_is_knocked_at_anew() -> None:
    """Its number is the same, and so are the numbers of its calls."""
    (before, lost), (after, asked) = end(0, 1), end(0, 2)
    barrier_client = BarrierClient(HIDDEN)
    barrier_client.enter(False)
    barrier_client.arrive([before])
    barrier_client.arrive([])
    barrier_client.arrive([after])
    assert len(asked.posted) == 1
    answered(barrier_client, after, asked.posted[0])
    assert barrier_client.poll() and len(lost.posted) == 1


def test_a_knock_before_work_came_is_for_the_same_step() -> None:
    gate, asked = end()
    barrier_client = BarrierClient(HIDDEN)
    barrier_client.enter(False)
    barrier_client.arrive([gate])
    barrier_client.enter(True)
    barrier_client.arrive([gate])
    assert steps(asked) == [1, 1]
    answered(barrier_client, gate, asked.posted[0])
    assert barrier_client.poll()
    barrier_client.enter(True)
    answered(barrier_client, gate, asked.posted[1])
    assert not barrier_client.poll(), "that was the same step"


def test_a_new_client_learns_the_number_of_the_step() -> None:
    gate, asked = end()
    barrier_client = BarrierClient(HIDDEN)
    for step in (40, 41):
        barrier_client.enter(False)
        barrier_client.arrive([gate])
        answered(barrier_client, gate, asked.posted[-1], step)
        assert barrier_client.poll()
    assert steps(asked) == [1, 41]


@pytest.mark.parametrize("work", [False, True])
def test_who_waits_without_rows_is_idle(work: bool) -> None:
    barrier_client = BarrierClient(HIDDEN)
    assert not barrier_client.is_idle
    barrier_client.enter(work)
    assert barrier_client.is_idle is not work


def test_a_gate_that_dies_is_tried_again() -> None:
    gate, asked = end()
    barrier_client = BarrierClient(HIDDEN)
    barrier_client.enter(True)
    asked.dead = True
    barrier_client.arrive([gate])
    asked.dead = False
    barrier_client.arrive([gate])
    assert len(asked.posted) == 1


def test_an_answer_that_is_told_twice_is_released_once() -> None:
    gate, asked = end()
    barrier_client = BarrierClient(HIDDEN)
    barrier_client.enter(True)
    barrier_client.arrive([gate])
    for _ in range(2):
        answered(barrier_client, gate, asked.posted[0])
    assert asked.released == [0]
