"""Somebody on the way changes what a client and a server in other processes send: no answer is wrong."""

from __future__ import annotations

import random
from itertools import product

import pytest
from tests.support.call_pairs import HEAP, SECRET, ask, line, lost, noise, process, until
from tests.support.flipping_relay import Change, Relay, relay

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.transport.authentication import GREETING, NONCE, PROOF
from moesaic.transport.calls import Caller
from moesaic.transport.listening import connect
from moesaic.transport.sealing import HEADER, RECORD

pytestmark = pytest.mark.slow
HANDSHAKE = {"up": len(GREETING) + NONCE + 16 + PROOF, "down": len(GREETING) + NONCE + PROOF}
"""Bytes that each direction carries before the first record."""
ROWS, ROW = 8, 1792
"""The answer has 14 KB."""
SIZE = ROWS * ROW
FAR = random.Random(1)
AFTER = [0, 3, 4, HEADER - 1, HEADER, HEADER + 31, HEADER + 32, HEADER + 40, 1000, SIZE // 2, SIZE]
AFTER += [FAR.randrange(3 * SIZE) for _ in range(9)]
"""Bytes after the handshake: a length, its tag, a frame's header, row numbers, rows, and their tags."""


def echoed(caller: Caller, count: int, size: int = SIZE, rows: int = ROWS) -> int:
    """Ask for `count` echoes, one after the other. Returns how many came, each of them unchanged."""
    for turn in range(count):
        request = noise(size, turn)
        try:
            call = ask(caller, request, rows, size // rows)
            left = rows

            def done() -> bool:
                nonlocal left
                left -= sum(len(found) for _, found in caller.poll())
                return not left

            until(done, caller)
        except ConnectionLost:
            return turn
        assert bytes(call.answer) == request, f"answer {turn} is wrong"
        caller.release(call)
    return count


def flips(between: Relay, count: int) -> bool:
    """Whether so many changes were made. The relay's word arrives by another way than the bytes."""
    until(lambda: len(between.flipped) >= count)
    return len(between.flipped) == count


def test_a_changed_bit_ends_the_connection_and_changes_no_answer() -> None:
    """The server, the relay and this process go on: each change meets a new connection."""
    changes = [
        Change(way, HANDSHAKE[way] + after, FAR.randrange(8)) for way, after in product(("up", "down"), AFTER)
    ]
    with process("server", "tcp:127.0.0.1:0", "echo") as server, relay(line(server), *changes) as between:
        address = f"tcp:127.0.0.1:{between.port}"
        for number, change in enumerate(changes, start=1):
            caller = connect(address, SECRET, heap_bytes=HEAP)
            assert echoed(caller, 6) < 6, f"{change} was not noticed"
            assert flips(between, number)
            why = lost(caller)
            if change.direction == "down":
                assert why.startswith("encrypted record ") and why.endswith(" on the way"), why
            caller.close()
        caller = connect(address, SECRET, heap_bytes=HEAP)
        assert echoed(caller, 6) == 6
        caller.close()


def test_a_changed_bit_in_the_handshake_keeps_the_two_apart() -> None:
    places = {way: [0, 7, 8, 39, 40, size - 1] for way, size in HANDSHAKE.items()}
    changes = [Change(way, at, FAR.randrange(8)) for way in places for at in places[way]]
    with process("server", "tcp:127.0.0.1:0", "echo") as server, relay(line(server), *changes) as between:
        address = f"tcp:127.0.0.1:{between.port}"
        for change in changes:
            with pytest.raises(ConnectionLost, match="no connection to"):
                connect(address, SECRET, timeout=5.0)
                pytest.fail(f"{change} was not noticed")
        caller = connect(address, SECRET)
        assert echoed(caller, 1) == 1
        caller.close()


@pytest.mark.parametrize("way", ["up", "down"])
def test_pieces_that_are_repeated_left_out_swapped_or_cut(way: str) -> None:
    changes = [Change(way, attack, 0) for attack in (-1, -2, -3, -4)]
    with process("server", "tcp:127.0.0.1:0", "echo") as server, relay(line(server), *changes) as between:
        address = f"tcp:127.0.0.1:{between.port}"
        for number, change in enumerate(changes, start=1):
            caller = connect(address, SECRET)
            large = 5 * RECORD
            assert echoed(caller, 3, large, 1) < 3, f"{change} was not noticed"
            assert flips(between, number)
            with pytest.raises(ConnectionLost) as raised:
                caller.poll()
            assert way == "up" or isinstance(raised.value, DamagedMessage), raised.value
            caller.close()
        caller = connect(address, SECRET)
        assert echoed(caller, 3, large, 1) == 3
        caller.close()
