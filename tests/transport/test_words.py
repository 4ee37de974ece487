"""What two ends tell each other before a connection is used."""

from __future__ import annotations

import socket
import struct

import pytest

from moesaic.core.errors import ConnectionLost
from moesaic.transport.words import MAX_WORD, hear, say


def test_words_arrive() -> None:
    here, there = socket.socketpair()
    with here, there:
        say(here, pe=3, job="a")
        assert hear(there) == {"pe": 3, "job": "a"}


@pytest.mark.parametrize("said", [b"[" * 60000, b"\xff", b"3", b"1" * 60000], ids=["deep", "raw", "3", "big"])
def test_words_that_are_no_json_object(said: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(struct.pack("<I", len(said)) + said)
        with pytest.raises(ConnectionLost, match="no JSON"):
            hear(there)


def test_words_that_never_end() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(struct.pack("<I", MAX_WORD + 1))
        with pytest.raises(ConnectionLost, match=f"it said {MAX_WORD + 1} bytes"):
            hear(there)
