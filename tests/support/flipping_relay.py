"""`python -m tests.support.flipping_relay TARGET [DIRECTION:BYTE:BIT ...]`: a TCP relay that changes bits.

It prints the port on which it listens, and carries each connection to TARGET (host:port). The first
connection meets the first change, the second one the second, and those after the last change are carried
unchanged. DIRECTION is "up" (to the target) or "down". BYTE counts the bytes of that direction from 0.
A negative BYTE is an attack on whole pieces of 1,000 bytes after the first 1,000: -1 repeats one, -2 leaves
one out, -3 swaps two, and -4 closes the connection in the middle of one. "flipped" is printed for each change
that was made.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PIECE = 1000


@dataclass(frozen=True)
class Change:
    """What happens to one connection."""

    direction: str
    byte: int
    bit: int

    def __str__(self) -> str:
        return f"{self.direction}:{self.byte}:{self.bit}"


@dataclass
class Relay:
    """A relay that runs, as a test sees it."""

    port: int
    flipped: list[str] = field(default_factory=list)
    """A line for each change that was made."""


@contextmanager
def relay(target: str, *changes: Change) -> Iterator[Relay]:
    """A relay in a process of its own. target: tcp:host:port."""
    command = [sys.executable, "-m", "tests.support.flipping_relay", target.removeprefix("tcp:")]
    process = subprocess.Popen([*command, *map(str, changes)], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            found = Relay(int(process.stdout.readline()))
            reader = threading.Thread(target=found.flipped.extend, args=(process.stdout,))
            reader.start()
            yield found
        finally:
            process.kill()
            reader.join()


# ---- the process


def main(target: str, *changes: str) -> None:
    planned = [Change(way, int(byte), int(bit)) for way, byte, bit in (one.split(":") for one in changes)]
    host, port = target.split(":")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        say(str(listening.getsockname()[1]))
        while True:
            near, _ = listening.accept()
            try:
                far = socket.create_connection((host, int(port)), 10.0)
            except OSError:
                near.close()
                continue
            change = planned.pop(0) if planned else Change("", 0, 0)
            for way, source, sink in (("up", near, far), ("down", far, near)):
                alter = alteration(change) if way == change.direction else lambda data, at: [data]
                threading.Thread(target=carry, args=(source, sink, alter), daemon=True).start()


Alter = Callable[[bytes, int], list[bytes]]
"""The pieces to send in place of (a piece, its first byte's number)."""


def carry(source: socket.socket, sink: socket.socket, alter: Alter) -> None:
    """Carry what one end sends, in pieces. An empty piece ends both directions."""
    for sock in (source, sink):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    at = 0
    try:
        while data := source.recv(PIECE - at % PIECE):
            for piece in alter(data, at):
                if not piece:
                    return
                sink.sendall(piece)
            at += len(data)
    except OSError:
        pass  # one of them is gone
    finally:
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it ended first


def alteration(change: Change) -> Alter:
    kept = b""
    """A piece that is held back."""
    done = False

    def flip(data: bytes, at: int) -> list[bytes]:
        index = change.byte - at
        if not 0 <= index < len(data):
            return [data]
        say("flipped")
        return [data[:index] + bytes([data[index] ^ 1 << change.bit]) + data[index + 1 :]]

    def move(data: bytes, at: int) -> list[bytes]:
        nonlocal kept, done
        if done or at < PIECE:
            return [data]
        if change.byte == -3 and not kept:
            kept = data
            return []
        done = True
        say("flipped")
        return {-1: [data, data], -2: [], -3: [data, kept], -4: [data[: len(data) // 2], b""]}[change.byte]

    return flip if change.byte >= 0 else move


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
