"""Strangers at the cluster's door, in a process of its own, keep no server out and use nothing up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from moesaic.cluster.join_listener import MAX_PENDING
from moesaic.cluster.joining import enlisting
from moesaic.cluster.joining.options import JoinOptions
from moesaic.core import messages
from moesaic.transport import address as addresses
from moesaic.transport.authentication import GREETING, NONCE
from moesaic.transport.wakeup import Wakeup
from tests.support.call_pairs import until

SECRET = b"a secret of the tests"
DESCRIPTORS = 200
"""The most that the process of the door may have."""
DOOR = """
import logging, os, resource, sys, time
from moesaic.cluster import join_listener
resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))
logging.basicConfig(format="%(message)s")
join_listener.HANDSHAKE_SECONDS = {seconds}
door = join_listener.JoinListener("tcp:127.0.0.1:0", {secret!r}, lambda one: print("welcome", flush=True))
print(door.address, flush=True)
sys.stdin.read()
door.close()
print(door.num_dropped, flush=True)
"""


class Door:
    """A JoinListener in another process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.address = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def end(self) -> int:
        """Close it. Returns how many peers it dropped."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return int(self.line())


@contextmanager
def door(log: Path, seconds: float) -> Iterator[Door]:
    """seconds: for each handshake."""
    program = DOOR.format(descriptors=DESCRIPTORS, seconds=seconds, secret=SECRET)
    pipe = subprocess.PIPE
    with log.open("w") as errors:
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process:
            try:
                yield Door(process, log)
            finally:
                process.kill()


def stranger(address: str, says: bytes, stack: ExitStack) -> None:
    sock = stack.enter_context(addresses.dial(addresses.parse(address), 10.0))
    if says:
        sock.sendall(says)


def joins(found: Door) -> None:
    """A server comes in, at the first attempt."""
    wakeup = Wakeup()
    connection, _ = enlisting.connect(JoinOptions(found.address), SECRET, None, wakeup.ring)
    connection.send(messages.Enlist("expert-server"))
    assert found.line() == "welcome"
    connection.close()
    wakeup.close()


SAYINGS = [b"", GREETING, GREETING + bytes(NONCE - 1), GREETING + bytes(NONCE), GREETING + bytes(NONCE + 47)]
"""Nothing, and handshakes that stop at each of their steps."""


@pytest.mark.slow
def test_silent_strangers_keep_nobody_out_and_use_nothing_up(tmp_path: Path) -> None:
    """They stay connected, and there are far more of them than descriptors."""
    count = 4 * DESCRIPTORS
    with door(tmp_path / "log", seconds=1e6) as found, ExitStack() as stack:
        joins(found)
        before = found.descriptors
        for number in range(count):
            stranger(found.address, SAYINGS[number % len(SAYINGS)], stack)
            if number % 200 == 199:
                joins(found)
        until(
            lambda: found.descriptors <= before + MAX_PENDING + 8
        )  # the last ones are closed a moment later
        joins(found)
        assert found.end() >= count - MAX_PENDING
    lines = (tmp_path / "log").read_text().splitlines()
    assert 1 <= len(lines) <= 30 and f"it was the oldest of {MAX_PENDING} handshakes" in lines[0]


@pytest.mark.slow
def test_strangers_that_stay_silent_are_dropped_at_their_deadline(tmp_path: Path) -> None:
    with door(tmp_path / "log", seconds=3.0) as found, ExitStack() as stack:
        before = found.descriptors
        for number in range(MAX_PENDING):
            stranger(found.address, SAYINGS[number % len(SAYINGS)], stack)
        until(lambda: found.descriptors == before + MAX_PENDING)
        until(lambda: found.descriptors == before)
        joins(found)
        assert found.end() == MAX_PENDING
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2 and all("timed out" in line for line in lines), lines
    assert f"the last of {MAX_PENDING - 1} such lines" in lines[1]
