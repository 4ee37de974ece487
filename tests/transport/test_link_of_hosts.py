"""The measurement of links between hosts that are network namespaces."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from tests.support.hosts import Hosts, missing

from moesaic.core.messages import LinkTest, Shutdown
from moesaic.core.paced_devices import LinkModel
from moesaic.transport.authentication import Deadline, Terms, prove_as_client, prove_as_server
from moesaic.transport.calls import MIN_HEAP
from moesaic.transport.link_test import measure
from moesaic.transport.sealed_socket import wire
from moesaic.transport.stream import StreamConnection

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
SECRET = b"s" * 32


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def measured(hosts: Hosts) -> LinkModel | None:
    """What host 0 measures over an encrypted connection from host 1."""
    with hosts[0].entered(), socket.create_server((hosts[0].address, 0)) as listening:
        address = listening.getsockname()[:2]

        def send_back() -> None:
            with hosts[1].entered():
                sock = socket.create_connection(address)
            keys = prove_as_client(sock, SECRET, Terms("stream", MIN_HEAP), Deadline(30))
            there = StreamConnection(wire(sock, keys))
            while isinstance(message := there.receive(None), LinkTest):
                there.send(message)
            there.close()

        thread = threading.Thread(target=send_back)
        thread.start()
        sock, _ = listening.accept()
        _, keys = prove_as_server(sock, SECRET, Deadline(30))
        here = StreamConnection(wire(sock, keys))
        found = measure(here)
        here.send(Shutdown())
        thread.join()
        here.close()
        return found


def test_a_slow_link_is_not_measured_as_a_fast_one(hosts: Hosts) -> None:
    """16 Mbit/s are 2 MB/s. Figures of a busy machine are worse than those of the link, and never better."""
    hosts[1].limit("16mbit")
    found = measured(hosts)
    assert found is not None
    assert found.bandwidth < 3e6


def test_a_distant_host_has_its_latency(hosts: Hosts) -> None:
    hosts[1].disturb(delay=0.02)
    found = measured(hosts)
    assert found is not None
    assert found.latency >= 0.02
