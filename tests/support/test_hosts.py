"""Hosts of tests: what they share, how they end, and what their links do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, Hosts, missing, soon
from tests.support.processes import gone

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TOLD = "import os, sys; print(os.listdir('/dev/shm'), sorted(os.listdir('/tmp')), os.getcwd())"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def answers(hosts: Hosts, seconds: float = 10.0) -> bool:
    """Whether host 0 can be reached from host 1, by a new connection."""
    with hosts[0].entered(), socket.create_server((hosts[0].address, 0)) as listening:
        port = listening.getsockname()[1]
        with hosts[1].entered():
            try:
                socket.create_connection((hosts[0].address, port), seconds).close()
            except OSError:
                return False
    return True


def test_a_host_has_its_own_memory_files_and_network(hosts: Hosts) -> None:
    interfaces = socket.if_nameindex()
    hosts[0].run(["touch", "/dev/shm/a", "/tmp/b"])
    assert "['a'] ['b'" in hosts[0].run([sys.executable, "-c", TOLD])
    seen = hosts[1].run([sys.executable, "-c", TOLD])
    assert seen.startswith("[] [") and "'b'" not in seen and str(Path.cwd()) in seen
    assert not Path("/tmp/b").exists() and not Path("/dev/shm/a").exists()
    with hosts[0].entered():
        assert [name for _, name in socket.if_nameindex()] == ["lo", "eth0"]
    assert socket.if_nameindex() == interfaces


def test_a_host_that_is_killed_is_gone_at_once_and_can_boot_again(hosts: Hosts) -> None:
    child = hosts[1].popen(["sh", "-c", "sleep 100 & sleep 100"])
    with hosts[0].entered(), socket.create_server((hosts[0].address, 0)) as listening:
        hosts[1].popen(
            ["bash", "-c", f"exec 3<>/dev/tcp/{hosts[0].address}/{listening.getsockname()[1]}; cat"]
        )
        hosts[1].kill()
    assert child.returncode == -signal.SIGKILL and not hosts[1].up
    hosts[1].boot()
    assert answers(hosts)


@pytest.mark.slow
def test_a_link_that_is_cut_ends_no_connection(hosts: Hosts) -> None:
    with hosts[0].entered(), socket.create_server((hosts[0].address, 0)) as listening:
        with hosts[1].entered():
            near = socket.create_connection(listening.getsockname()[:2], 10.0)
        far, _ = listening.accept()
    with near, far:
        far.settimeout(0.5)
        hosts[1].cut()
        assert not answers(hosts, 0.3)
        near.sendall(b"lost?")
        with pytest.raises(TimeoutError):
            far.recv(16)
        hosts[1].heal()
        far.settimeout(30.0)
        assert far.recv(16) == b"lost?"


def carried(hosts: Hosts, size: int) -> bytes:
    """What arrives at host 0 of `size` bytes that host 1 sends, over a connection that ends then."""
    with hosts[0].entered(), socket.create_server((hosts[0].address, 0)) as listening:
        program = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])));"
        program += "s.sendall(bytes(range(256)) * (int(sys.argv[3]) // 256))"
        port = str(listening.getsockname()[1])
        child = hosts[1].popen([sys.executable, "-c", program, hosts[0].address, port, str(size)])
        far, _ = listening.accept()
    with far:
        far.settimeout(30.0)
        found = b"".join(iter(lambda: far.recv(1 << 16), b""))
    child.wait(10)
    return found


@pytest.mark.slow
def test_slow_and_lossy_links_carry_everything(hosts: Hosts) -> None:
    whole = bytes(range(256)) * 1024
    hosts[1].limit("20mbit")
    assert carried(hosts, len(whole)) == whole
    hosts[1].limit(None)
    hosts[1].disturb(delay=0.02, loss=0.02)
    assert carried(hosts, len(whole)) == whole
    hosts[1].disturb(loss=1.0)
    assert not answers(hosts, 0.3)
    hosts[1].calm()
    assert answers(hosts)


@pytest.mark.slow
def test_nothing_is_left_of_a_test_that_is_killed() -> None:
    program = (
        "import sys, time; from tests.support.hosts import Hosts; hosts = Hosts(2).__enter__();"
        "child = hosts[1].popen(['sleep', '100']); hosts[0].disturb(delay=0.1);"
        "print(*hosts.pids, child.pid, hosts[0]._relay.pid, flush=True); time.sleep(100)"
    )
    before = set(Path("/tmp").iterdir())
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 5 and not any(map(gone, pids))
        os.kill(process.pid, signal.SIGKILL)
    soon(lambda: all(map(gone, pids)))
    assert not [path for path in set(Path("/tmp").iterdir()) - before if "host" in path.name]
