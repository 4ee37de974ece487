"""What the checks of every transport (test_calls.py) do not see of one-sided writes. None needs NIXL."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from tests.support.call_pairs import HEAP, SECRET, ask, incoming, lost
from tests.support.fake_link import FakeLink, one_sided_pair

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import nixl_link
from moesaic.transport.authentication import Deadline, Terms, prove_as_client
from moesaic.transport.calls import MAX_CALLS, MAX_ROWS
from moesaic.transport.frames import REQUEST, ROWS
from moesaic.transport.listening import Listener, connect
from moesaic.transport.nixl_link import NixlLink, check_nixl
from moesaic.transport.one_sided_calls import HEADER, OneSidedAnswerer, OneSidedCaller, Places

AREA = 1 << 16
GOOD = (REQUEST, 2, 1, 8, 100, 64, 0)


@pytest.fixture
def server() -> Iterator[tuple[socket.socket, OneSidedAnswerer]]:
    """A server's end, and the socket of a client that says what it likes."""
    theirs, ours = socket.socketpair()
    answerer = OneSidedAnswerer(ours, cast(NixlLink, FakeLink(AREA)))
    yield theirs, answerer
    theirs.close()
    answerer.close()


@pytest.mark.parametrize(
    "frame",
    [
        (ROWS, *GOOD[1:]),
        (REQUEST, 0, *GOOD[2:]),
        (REQUEST, MAX_ROWS + 1, *GOOD[2:]),
        (*GOOD[:5], AREA - 115, 0),
        (*GOOD[:5], 2**64 - 1, 0),
        (*GOOD[:4], AREA, 64, 0),
        (*GOOD[:3], 2**63, *GOOD[4:]),
    ],
    ids=["no request", "no rows", "rows", "place", "far place", "request", "rows' bytes"],
)
def test_a_damaged_request_ends_the_connection(
    frame: tuple[int, ...], server: tuple[socket.socket, OneSidedAnswerer]
) -> None:
    theirs, answerer = server
    theirs.sendall(HEADER.pack(*GOOD) + HEADER.pack(*frame[:2], 2, *frame[3:]))
    (first,) = incoming(_Nobody(), answerer)
    assert first.number == 1 and len(first.answer) == 16
    assert "damaged" in lost(answerer)


def test_a_call_that_is_open_is_not_opened_again(server: tuple[socket.socket, OneSidedAnswerer]) -> None:
    theirs, answerer = server
    theirs.sendall(HEADER.pack(*GOOD) * 2)
    incoming(_Nobody(), answerer)
    assert "damaged" in lost(answerer)


def test_a_client_has_a_limited_number_of_calls(server: tuple[socket.socket, OneSidedAnswerer]) -> None:
    theirs, answerer = server
    theirs.sendall(b"".join(HEADER.pack(REQUEST, 1, number, 0, 0, 0, 0) for number in range(MAX_CALLS + 1)))
    incoming(_Nobody(), answerer, MAX_CALLS)
    assert f"more than {MAX_CALLS}" in lost(answerer)


@pytest.mark.parametrize(
    ("frame", "rows"),
    [
        ((REQUEST, 1, 1, 4), [0]),
        ((ROWS, 1, 2, 4), [0]),
        ((ROWS, 1, 1, 5), [0]),
        ((ROWS, 0, 1, 4), []),
        ((ROWS, 1, 1, 4), [3]),
        ((ROWS, 2, 1, 4), [1, 1]),
    ],
)
def test_damaged_rows_end_the_connection(frame: tuple[int, ...], rows: list[int]) -> None:
    ours, theirs = socket.socketpair()
    link = FakeLink(AREA)
    link.peer = FakeLink(AREA)
    caller = OneSidedCaller(ours, cast(NixlLink, link))
    ask(caller, b"abc", 3, 4)
    theirs.sendall(HEADER.pack(*frame, 0, 0, 0) + np.array(rows, "<u4").tobytes())
    assert "damaged" in lost(caller)
    caller.close()
    theirs.close()


def test_rows_whose_write_never_arrives_end_with_the_connection() -> None:
    """A server that dies leaves such rows. The client is told of the end, not of the rows."""
    ours, theirs = socket.socketpair()
    link = FakeLink(AREA)
    link.peer = FakeLink(AREA)
    caller = OneSidedCaller(ours, cast(NixlLink, link))
    ask(caller, b"abc", 1, 4)
    theirs.sendall(HEADER.pack(ROWS, 1, 1, 4, 0, 0, 7) + np.array([0], "<u4").tobytes())
    theirs.recv(1024)
    theirs.close()
    assert "closed" in lost(caller)
    caller.close()


def test_a_link_that_fails_ends_the_connection() -> None:
    caller, answerer = one_sided_pair(HEAP)
    caller._link.failure = "no way to the other end"
    assert lost(caller) == "no way to the other end"
    with pytest.raises(ConnectionLost, match="no way"):
        caller.open(1, 1, 1)
    caller.close()
    answerer.close()


def test_places_are_apart_and_join_again() -> None:
    rng = np.random.default_rng(0)
    places, used = Places(AREA), dict[int, int]()
    for _ in range(2000):
        count = int(rng.integers(0, 5000))
        begin = places.take(count)
        if begin is None or rng.random() < 0.3:
            for old in list(used)[: len(used) // 2]:
                places.give_back(old, used.pop(old))
        if begin is not None:
            assert begin % 64 == 0 and begin + count <= AREA
            assert all(begin + count <= at or at + size <= begin for at, size in used.items())
            used[begin] = count
    for old, count in used.items():
        places.give_back(old, count)
    assert places.take(AREA) == 0 and places.take(0) is None


def test_who_does_not_allow_one_sided_writes_refuses_them() -> None:
    listener = Listener("tcp:127.0.0.1:0", SECRET)
    host, port = listener.address.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port))) as sock:
        prove_as_client(sock, SECRET, Terms("nixl", AREA), Deadline(20.0))
        assert sock.recv(1) == b""
    listener.close()


def test_without_nixl_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_link, "PACKAGES", ("moesaic.missing",))
    wanted = r"got 'nixl'; .*NIXL is not installed: pip install 'moesaic\[nixl\]'"
    with pytest.raises(ConfigError, match=wanted):
        check_nixl("tcp")
    with pytest.raises(ConfigError, match=wanted):
        connect("tcp:127.0.0.1:1", SECRET, "nixl")


def test_the_user_has_to_say_what_ucx_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise UCX opens a TCP port that asks nobody for a secret."""
    monkeypatch.setattr(nixl_link, "available", lambda: True)
    with pytest.raises(ConfigError, match="--transport nixl: set UCX_TLS on every host"):
        check_nixl(None)


class _Nobody:
    def poll(self) -> list[object]:
        return []


CLOSES_AND_ENDS = """
from moesaic.transport import nixl_link

class Agent:
    left = 5

    def check_xfer_state(self, handle):
        self.left -= 1
        return "PROC" if self.left else "DONE"

    def transfer(self, *_): return "PROC"
    def get_new_notifs(self): return {}
    def get_xfer_descs(self, *_): pass
    def initialize_xfer(self, *_): pass
    def register_memory(self, *_): pass
    def deregister_memory(self, memory): print("the write has ended")

nixl_link._library, nixl_link._agent = lambda: None, lambda library, name: Agent()
link = nixl_link.NixlLink(4096)
link.write(1, [(0, 8)])
link.close()
"""


def test_a_process_ends_once_its_writes_have() -> None:
    """Python ends daemon threads when they leave compiled code. In NIXL's, that would abort the process."""
    ended = subprocess.run([sys.executable, "-c", CLOSES_AND_ENDS], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the write has ended\n", "")
