"""Connections to a host that vanished end; those to a frozen process stay."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.support.hosts import PATIENCE, Hosts, missing

from moesaic.transport import address as addresses
from moesaic.transport.host_watch import SILENT_SECONDS, HostWatch, silence

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
FULL = b"x" * (1 << 20)
CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
time.sleep(100)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def accepted(hosts: Hosts) -> tuple[socket.socket, int]:
    """A connection of this process, on host 0, to a process of host 1, and the id of that process."""
    with hosts[0].entered(), socket.create_server((hosts[0].address, 0)) as listening:
        port = str(listening.getsockname()[1])
        client = hosts[1].popen([sys.executable, "-c", CLIENT, hosts[0].address, port])
        sock, _ = listening.accept()
    addresses.tune(sock)
    return sock, client.pid


@pytest.mark.parametrize("unsent", [False, True])
def test_a_connection_to_a_vanished_host_ends(unsent: bool, hosts: Hosts) -> None:
    sock, _ = accepted(hosts)
    with sock:
        HostWatch().add(sock)
        hosts[1].cut()
        if unsent:
            sock.sendall(b"never acknowledged")
        sock.settimeout(PATIENCE)
        assert sock.recv(1) == b""


def test_a_connection_to_a_frozen_process_stays(hosts: Hosts) -> None:
    """Also when it reads nothing and the socket is full, as while a server computes for long."""
    sock, pid = accepted(hosts)
    with sock:
        os.kill(pid, signal.SIGSTOP)
        HostWatch().add(sock)
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sock.send(FULL)
        time.sleep(SILENT_SECONDS + 2.0)
        assert silence(sock) < SILENT_SECONDS
        with pytest.raises(BlockingIOError):
            sock.recv(1)
