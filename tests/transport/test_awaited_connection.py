"""A connection to a process that is still to call."""

from __future__ import annotations

import threading

import pytest

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.transport.awaited_connection import AwaitedConnection
from moesaic.transport.local import local_pair

ONE, TWO, THREE = (messages.DirectorySettled(number) for number in range(3))


def test_what_is_sent_before_the_call_arrives_first_and_in_order() -> None:
    awaited, (ours, theirs) = AwaitedConnection(), local_pair()
    awaited.send(ONE)
    awaited.send(TWO)
    assert awaited.is_waiting and awaited.receive(0.0) is None
    assert awaited.connect(ours)
    awaited.send(THREE)
    assert [theirs.receive(60.0) for _ in range(3)] == [ONE, TWO, THREE]
    theirs.send(ONE)
    assert awaited.receive(60.0) == ONE and not awaited.is_waiting


def test_who_waits_for_a_message_gets_it_once_the_process_has_called() -> None:
    awaited, (ours, theirs) = AwaitedConnection(), local_pair()
    heard: list[messages.Message | None] = []

    def listen() -> None:
        while not any(heard):
            heard.append(awaited.receive(None))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    theirs.send(TWO)
    assert awaited.connect(ours)
    thread.join(60.0)
    assert heard[-1] == TWO


def test_messages_are_changed_on_their_way_in() -> None:
    (ours, theirs) = local_pair()
    awaited = AwaitedConnection(lambda message: THREE if message == ONE else message)
    awaited.connect(ours)
    theirs.send(ONE)
    theirs.send(TWO)
    assert [awaited.receive(60.0), awaited.receive(60.0)] in ([THREE, TWO], [None, THREE])


def test_a_process_that_will_not_come_ends_the_wait_with_its_reason() -> None:
    awaited, (ours, _) = AwaitedConnection(), local_pair()
    awaited.send(ONE)
    threading.Timer(0.05, lambda: awaited.fail("no node", messages.WorkerFailed("no file", True))).start()
    assert awaited.receive(None) == messages.WorkerFailed("no file", True)
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="no node"):
            awaited.receive(None)
    with pytest.raises(ConnectionLost, match="no node"):
        awaited.send(TWO)
    assert not awaited.connect(ours), "it came too late"


def test_a_second_process_and_a_late_reason_change_nothing() -> None:
    awaited, (ours, theirs), (other, _) = AwaitedConnection(), local_pair(), local_pair()
    assert awaited.connect(ours) and not awaited.connect(other)
    awaited.fail("too late")
    awaited.send(ONE)
    assert theirs.receive(60.0) == ONE


def test_closing_ends_the_wait() -> None:
    awaited = AwaitedConnection()
    threading.Timer(0.05, awaited.close).start()
    with pytest.raises(ConnectionLost, match="closed"):
        awaited.receive(None)


def test_a_process_that_calls_and_ends_at_once_is_lost() -> None:
    awaited, (ours, theirs) = AwaitedConnection(), local_pair()
    awaited.send(ONE)
    ours.close()
    theirs.close()
    assert awaited.connect(ours)
    with pytest.raises(ConnectionLost):
        while True:
            awaited.receive(60.0)
