"""Ends TCP connections whose other host has vanished, long before TCP would.

The kernel of the other host answers keepalive probes, one a second (`address.tune`), however busy or frozen
its processes are. So a connection on which nothing was acknowledged for `SILENT_SECONDS` leads to a host that
is gone or cannot be reached. TCP itself takes 30 s for that. Meanwhile a server with --schedule barrier would
wait for a client that is gone, and all other clients with it.

One thread watches all connections of the process. The owner of a connection sees an end like any other.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
import weakref

SILENT_SECONDS = 2.5
"""Seconds without an acknowledgement after which the other host is gone. One lost probe does not matter."""
LOOK_SECONDS = 0.25
_MILLISECONDS = struct.Struct("@II")
_OFFSET = 52
"""Where the last received data and acknowledgement are in Linux's struct tcp_info."""


class HostWatch:
    """Watches the connections of one process. Its thread starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_running = False

    def add(self, sock: socket.socket) -> None:
        """Watch a connection until it is closed. Unix sockets end with their process and need no watch."""
        if sock.family == socket.AF_UNIX or sys.platform != "linux":
            return
        with self._lock:
            self._sockets.add(sock)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="host watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                sockets = list(self._sockets)
            for sock in sockets:
                with contextlib.suppress(OSError):  # its owner has closed it
                    if silence(sock) > SILENT_SECONDS:
                        sock.shutdown(socket.SHUT_RDWR)  # its owner is told, as if the peer had closed it


def silence(sock: socket.socket) -> float:
    """Seconds since the other host sent or acknowledged something. Raises OSError for a closed socket."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _MILLISECONDS.size)
    data, acknowledgement = _MILLISECONDS.unpack_from(info, _OFFSET)
    return float(min(data, acknowledgement)) / 1000


_PROCESS = HostWatch()


def watch(sock: socket.socket) -> None:
    """Watch a connection of this process."""
    _PROCESS.add(sock)
