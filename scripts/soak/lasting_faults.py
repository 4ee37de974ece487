"""States that last: how a server is brought into each of them, and how it ends."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from scripts.soak.lasting_traffic import Traffic
from tests.support.troubled_server import TroubledServer

WATCH_SECONDS = 3.0
"""Seconds in which a process ends whose files were written over. It looks twice a second."""
SLOW_SITE = """
import os, time
while os.path.exists({flag!r}):
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Site:
    """Where states are made."""

    folder: Path
    disk: Path
    """The folder of the server's files and of its log."""
    can_fill: bool
    """Whether `disk` is a small disk of its own."""
    clock: dict[str, str] | None
    """The environment of a process whose clock can be set. None: there is no C compiler."""

    @property
    def slow_flag(self) -> Path:
        """While this file exists, no process starts."""
        return self.folder / "slow"

    def environment(self) -> dict[str, str]:
        """The environment of the server."""
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SLOW_SITE.format(flag=str(self.slow_flag)))
        return {"PYTHONPATH": str(site), **(self.clock or {})}


class Fault(ABC):
    """One kind of state."""

    name = ""

    def can_be_made(self, site: Site) -> bool:
        """Whether this machine lets it be made."""
        return True

    @abstractmethod
    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        """Brings the server into the state."""

    @abstractmethod
    def end(self, server: TroubledServer, site: Site, traffic: Traffic) -> None:
        """Ends the state."""


class ChangedFile(Fault):
    """Weights are written over in place with other bytes, and put back.

    Tokens of the half second before a process ends may be of the new bytes, so no request is sent then.
    """

    name = "file changed"

    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        other_bytes = bytearray(server.weights.read_bytes())
        (site.folder / "old").write_bytes(other_bytes)
        for place in range(len(other_bytes) // 2, len(other_bytes), 64):
            other_bytes[place] ^= 1
        with traffic.paused():
            write_in_place(server.weights, bytes(other_bytes))
            time.sleep(WATCH_SECONDS)

    def end(self, server: TroubledServer, site: Site, traffic: Traffic) -> None:
        write_in_place(server.weights, (site.folder / "old").read_bytes())
        time.sleep(WATCH_SECONDS)


class RewrittenFile(ChangedFile):
    """Weights are written over in place with the same bytes, while requests are computed."""

    name = "file rewritten"

    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        old_bytes = server.weights.read_bytes()
        (site.folder / "old").write_bytes(old_bytes)
        write_in_place(server.weights, old_bytes)


class MissingFile(Fault):
    """Weights are away, and a process dies."""

    name = "file missing"

    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        server.weights.rename(server.weights.with_suffix(".away"))
        time.sleep(2.0)
        kill_any(server, rng)

    def end(self, server: TroubledServer, site: Site, traffic: Traffic) -> None:
        server.weights.with_suffix(".away").rename(server.weights)


class LowLimit(Fault):
    """Expert servers may open no descriptor, and an attention worker dies: the next one cannot connect."""

    name = "limit lowered"

    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        for pid in pids_of(server, "expert server"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                limit_descriptors(pid, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        kill_any(server, rng, "attention worker")

    def end(self, server: TroubledServer, site: Site, traffic: Traffic) -> None:
        for pid in pids_of(server, "expert server"):
            with contextlib.suppress(ProcessLookupError):
                limit_descriptors(pid, 1024)


class FullDisk(Fault):
    """The disk of the log and of the checkpoint is full, and a process dies."""

    name = "disk full"

    def can_be_made(self, site: Site) -> bool:
        return site.can_fill

    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        with contextlib.suppress(OSError), (site.disk / "fill").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        kill_any(server, rng)

    def end(self, server: TroubledServer, site: Site, traffic: Traffic) -> None:
        (site.disk / "fill").unlink()


class SetClock(Fault):
    """The clock is set by an hour and back, and a process dies."""

    name = "clock set"

    def can_be_made(self, site: Site) -> bool:
        return site.clock is not None

    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        self._set(site, rng.choice((3600, -3600)))
        kill_any(server, rng)

    def end(self, server: TroubledServer, site: Site, traffic: Traffic) -> None:
        self._set(site, 0)

    @staticmethod
    def _set(site: Site, seconds: int) -> None:
        assert site.clock is not None
        Path(site.clock["CLOCK_OFFSET_FILE"]).write_text(str(seconds))


class SlowStart(Fault):
    """A process dies, and the one that replaces it does not load until the state ends."""

    name = "slow start"

    def begin(self, server: TroubledServer, site: Site, traffic: Traffic, rng: random.Random) -> None:
        site.slow_flag.touch()
        kill_any(server, rng)

    def end(self, server: TroubledServer, site: Site, traffic: Traffic) -> None:
        site.slow_flag.unlink()


FAULTS = (
    *(MissingFile(), SetClock(), ChangedFile(), LowLimit()),
    *(FullDisk(), RewrittenFile(), SlowStart()),
)
"""They take turns."""


def write_in_place(file: Path, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.write(data)


def pids_of(server: TroubledServer, role: str = "") -> list[int]:
    """The processes whose names begin with `role`."""
    processes = server.status()["processes"]
    return [process["pid"] for process in processes if process["pid"] and process["name"].startswith(role)]


def kill_any(server: TroubledServer, rng: random.Random, role: str = "") -> None:
    server.until(lambda: pids_of(server, role))
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(pids_of(server, role)), signal.SIGKILL)


def limit_descriptors(pid: int, number: int) -> None:
    """Sets how many descriptors a process may have open."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
