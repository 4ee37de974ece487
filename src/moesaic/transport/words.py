"""The JSON objects that two ends send each other before a connection is used."""

from __future__ import annotations

import json
import struct
from typing import Any

from moesaic.core.errors import ConnectionLost
from moesaic.transport.sealed_socket import Wire

MAX_WORD = 1 << 16
"""Maximum bytes of a JSON object."""
Word = dict[str, Any]
_LENGTH = struct.Struct("<I")


def say(wire: Wire, **word: object) -> None:
    """Send these fields to the other end as one JSON object."""
    data = json.dumps(word).encode()
    wire.sendall(memoryview(_LENGTH.pack(len(data)) + data))


def hear(wire: Wire) -> Word:
    """Receive a JSON object of the other end.

    Raises ConnectionLost, or TimeoutError after the timeout of the socket.
    """
    (length,) = _LENGTH.unpack(_read(wire, _LENGTH.size))
    if length > MAX_WORD:
        raise ConnectionLost(f"it said {length} bytes at once")
    try:
        word = json.loads(_read(wire, length))
    except (ValueError, RecursionError):
        raise ConnectionLost("what it said is no JSON") from None
    if not isinstance(word, dict):
        raise ConnectionLost("what it said is no JSON object")
    return word


def _read(wire: Wire, count: int) -> bytes:
    data = memoryview(bytearray(count))
    num_filled = 0
    while num_filled < count:
        got = wire.recv_into(data[num_filled:])
        if not got:
            raise ConnectionLost("the other end closed the connection")
        num_filled += got
    return bytes(data)
