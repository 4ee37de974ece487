"""HTTP by hand, for clients that are slow, silent or wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

SECONDS = 60.0
"""Longer than any answer of a test may take."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    """Lower-case names."""
    body: bytes

    @property
    def code(self) -> str:
        """The code of an error in OpenAI's shape."""
        return str(json.loads(self.body)["error"]["code"])


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def head(path: str, length: int | None = None, *more: str, host: str = "localhost") -> bytes:
    """The head of a GET, or of a POST with `length` bytes of JSON. more: further lines."""
    lines = [f"{'GET' if length is None else 'POST'} {path} HTTP/1.1", f"Host: {host}", *more]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: dict[str, Any], *more: str) -> bytes:
    text = json.dumps(body).encode()
    return head(path, len(text), *more) + text


def read(sock: socket.socket) -> Answer | None:
    """Everything up to the end of the connection, as one answer. None if the server said nothing."""
    said = b""
    while piece := sock.recv(1 << 16):
        said += piece
    if not said:
        return None
    top, _, body = said.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return Answer(int(first.split()[1]), {name.lower(): value for name, _, value in pairs}, body)


def ask(port: int, request: bytes) -> Answer | None:
    """Send `request`, whose head should have "Connection: close", and read the answer."""
    with connect(port) as sock:
        sock.sendall(request)
        return read(sock)


def get(port: int, path: str, host: str = "localhost") -> int:
    """The status of a GET."""
    answer = ask(port, head(path, None, "Connection: close", host=host))
    assert answer is not None
    return answer.status


@contextmanager
def silent(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing. They do not wait for the server to accept them."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in socks:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        yield socks
