"""Servers and clients in other processes that are killed, frozen or asleep."""

from __future__ import annotations

import select
import signal
import weakref
from pathlib import Path

import numpy as np
import pytest
from tests.support.call_pairs import (
    BETWEEN_PROCESSES,
    PATIENCE,
    SECRET,
    TRANSPORT,
    Silent,
    accepted,
    address_for,
    ask,
    descriptors,
    dial,
    incoming,
    line,
    lost,
    noise,
    pair,
    process,
    receive,
)

from moesaic.core.errors import ConnectionLost
from moesaic.transport.calls import Answerer, Caller
from moesaic.transport.listening import NIXL_KIND, Listener
from moesaic.transport.waiting import wait

KINDS = pytest.mark.parametrize("kind", BETWEEN_PROCESSES)


@KINDS
def test_another_process_answers(kind: str, tmp_path: Path) -> None:
    with process("server", address_for(kind, tmp_path), "echo") as server:
        caller = dial(kind, line(server))
        for size in (1, 14_336, 3_000_001):
            call = ask(caller, noise(size), 1, size)
            assert receive(caller) == [(call, [0])]
            assert bytes(call.answer) == noise(size)
            caller.release(call)
        caller.close()


@KINDS
def test_a_server_killed_in_the_middle_of_a_call(kind: str, tmp_path: Path) -> None:
    with process("server", address_for(kind, tmp_path), "first") as server:
        caller = dial(kind, line(server))
        call = ask(caller, b"aabbcc", 3, 2)
        assert line(server, caller) == "answered"
        server.kill()
        server.wait()
        if kind != "nixl":  # there a row whose write had not ended is lost
            assert receive(caller) == [(call, [0])]  # what it had published is there
            assert bytes(call.answer[:2]) == b"aa"
        lost(caller)
        with pytest.raises(ConnectionLost):
            caller.post(ask(caller, b"", 1, 1))
        caller.close()


@pytest.mark.slow
@KINDS
def test_a_death_ends_the_sleep(kind: str, tmp_path: Path) -> None:
    with process("server", address_for(kind, tmp_path), "never") as server:
        caller = dial(kind, line(server))
        ask(caller, b"a", 1, 1)
        assert line(server, caller) == "answered"
        assert not wait([caller], timeout=0.05)
        server.kill()
        assert wait([caller], timeout=PATIENCE)
        lost(caller)
        caller.close()


class Witness:
    """What somebody holds who sees a connection end."""


def see_it_end(caller: Caller) -> weakref.ref[Witness]:
    witness = Witness()
    while True:
        try:
            caller.poll()
        except ConnectionLost:
            return weakref.ref(witness)
        assert wait([caller], timeout=PATIENCE)


@KINDS
def test_a_lost_connection_keeps_nobody_who_saw_its_end(kind: str, tmp_path: Path) -> None:
    """Else its memory would be kept with them, until the garbage collector comes by."""
    with pair(kind, tmp_path) as (caller, answerer):
        answerer.close()
        for _ in range(2):
            assert see_it_end(caller)() is None


@pytest.mark.slow
@KINDS
def test_a_frozen_server_is_silent_and_goes_on(kind: str, tmp_path: Path) -> None:
    with process("server", address_for(kind, tmp_path), "echo") as server:
        caller = dial(kind, line(server))
        server.send_signal(signal.SIGSTOP)
        call = ask(caller, b"abc", 1, 3)
        assert not wait([caller], timeout=0.2) or kind == "nixl"  # its write is under way
        assert caller.poll() == []
        server.send_signal(signal.SIGCONT)
        assert receive(caller) == [(call, [0])]
        assert bytes(call.answer) == b"abc"
        caller.close()


@pytest.mark.slow
@KINDS
def test_no_wake_up_is_lost(kind: str, tmp_path: Path) -> None:
    """Both sides go to sleep after every message, in every order that two cores produce."""
    with process("server", address_for(kind, tmp_path), "asleep") as server:
        caller = dial(kind, line(server))
        for turn in range(2000):
            call = ask(caller, turn.to_bytes(4, "little"), 1, 4)
            while not (news := caller.poll()):
                assert wait([caller], timeout=PATIENCE, spin=0.0), f"asleep for ever at turn {turn}"
            assert news[0][0] is call and call.answer == call.request
            caller.release(call)
        caller.close()


@pytest.mark.slow
@KINDS
def test_a_killed_client_leaves_nothing_at_the_server(kind: str, tmp_path: Path) -> None:
    listener = Listener(address_for(kind, tmp_path), SECRET, kinds=NIXL_KIND)
    before = descriptors()
    with process("client", listener.address, TRANSPORT.get(kind, "stream")) as client:
        assert line(client) == "posted"
        answerer = accepted(listener)
        (call,) = incoming(Silent(), answerer)
        assert bytes(call.request) == b"abcd"
        client.kill()
        lost(answerer)
        call.publish(np.array([0]))
        answerer.close()
    del call, answerer
    assert descriptors() == before
    assert "moesaic-calls" not in Path("/proc/self/maps").read_text()
    listener.close()


def test_the_doorbell_rings_for_sleepers_only(tmp_path: Path) -> None:
    with pair("shm", tmp_path) as (caller, answerer):
        ask(caller, b"", 2, 1)
        assert not readable(answerer)
        (call,) = answerer.poll()
        assert not answerer.arm()
        ask(caller, b"", 1, 1)
        assert readable(answerer)
        answerer.disarm()
        assert not readable(answerer)
        assert not caller.arm()
        call.publish(np.array([0]))
        assert readable(caller)
        caller.disarm()
        call.publish(np.array([1]))
        assert not readable(caller)


def test_news_from_before_the_flag_was_up_keeps_awake(tmp_path: Path) -> None:
    with pair("shm", tmp_path) as (caller, answerer):
        ask(caller, b"", 1, 1)
        assert answerer.arm()
        answerer.disarm()
        answerer.poll()[0].publish(np.array([0]))
        assert caller.arm()
        caller.disarm()


def readable(end: Caller | Answerer) -> bool:
    return bool(select.select([end], [], [], 0)[0])


def test_rows_that_come_with_the_death_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server publishes and dies after the client found no rows and before it looks at the socket."""
    with pair("shm", tmp_path) as (caller, answerer):
        call = ask(caller, b"", 1, 1)
        (one,) = incoming(caller, answerer)
        look = caller._look  # type: ignore[attr-defined]

        def die_first() -> None:
            one.publish(np.array([0]))
            answerer.close()
            look()

        monkeypatch.setattr(caller, "_look", die_first)
        while not (news := caller.poll()):
            pass
        assert [(found, rows.tolist()) for found, rows in news] == [(call, [0])]
        lost(caller)
