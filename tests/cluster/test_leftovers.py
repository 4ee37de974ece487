"""Whichever process of a service is killed, and whenever: no process and no file stays.

The folder for temporary files has a name that is too long for a Unix socket.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster_driver import PATIENCE

LONG = "a-folder-for-temporary-files-with-a-long-name" * 3
SHARED = Path("/dev/shm")
SERVE, WORKER, RANK, SERVER = "moesaic", "moesaic.runtime", "moesaic.runtime.group", "moesaic.experts"
GROUP = ("--tensor-parallel-size", "2")
SERVERS = ("--attention-workers", "2", "--expert-servers", "1")
BEGINNING, READY = -1.0, -2.0
"""Moments: when the process has just started, and when the service is ready. Others are seconds."""

CASES = [
    (GROUP, WORKER, BEGINNING),
    (GROUP, RANK, BEGINNING),
    (GROUP, SERVE, READY),
]
"""`test_no_part_of_a_trace_stays_of_a_process_that_was_killed` kills a server."""
MORE = [
    (SERVERS, SERVER, BEGINNING),
    (GROUP, WORKER, 0.0),
    (SERVERS, WORKER, 1.0),
    *((GROUP, victim, moment) for victim in (WORKER, RANK) for moment in (0.3, 0.6, 1.0, 2.0, 3.0, READY)),
    *((GROUP, SERVE, moment) for moment in (BEGINNING, 1.0, 2.0, 3.0, 4.0)),
    *((SERVERS, victim, READY) for victim in (SERVE, WORKER, SERVER)),
    *((SERVERS, SERVER, moment) for moment in (0.2, 0.5, 1.0)),
    *((SERVERS, SERVE, moment) for moment in (1.0, 3.0)),
]


@dataclass
class Service:
    """`moesaic serve` and the processes under it: all that have `folder` for their temporary files."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def processes(self, module: str | None = None) -> list[int]:
        """Process ids. module: only those that run `python -m module`."""
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._has(pid, module)]  # noqa: PTH208

    def _has(self, pid: int, module: str | None) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            return False  # it has ended, or belongs to another user
        ours = f"TMPDIR={self.folder}".encode() in environment
        return ours and (module is None or command[1:3] == ["-m", module])

    @property
    def ready(self) -> bool:
        return "Uvicorn running" in self.log.read_text() or "http://127.0.0.1" in self.log.read_text()

    def files(self) -> list[Path]:
        """What is in the folder, and files in /dev/shm that a process holds or maps."""
        held = set()
        for pid in self.processes():
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            held |= {Path(name) for name in re.findall(r" (/dev/shm/\S+)", maps)}
        return [*self.folder.iterdir(), *held]


@contextmanager
def service(flags: tuple[str, ...], folder: Path, more: tuple[str, ...] = ()) -> Iterator[Service]:
    temporary, log = folder / LONG, folder / "log"
    temporary.mkdir()
    command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--threads", "1"]
    command += ["--kv-cache-memory", "32MiB", *flags, *more]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    found = Service(process, temporary, log)
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        for pid in found.processes():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)


def soon(condition: Callable[[], object], found: Service) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, found.log.read_text()
        time.sleep(0.005)


def kill_and_look(flags: tuple[str, ...], victim: str, moment: float, folder: Path) -> None:
    before = set(SHARED.iterdir())
    with service(flags, folder) as found:
        if moment == READY:
            soon(lambda: found.ready, found)
        soon(lambda: found.processes(victim), found)
        if moment == BEGINNING and victim == WORKER:  # as soon as it has begun to make something
            soon(lambda: found.files() or found.processes(RANK) or found.ready, found)
        time.sleep(max(0.0, moment))
        used = found.files()
        for pid in found.processes(victim)[:1]:
            os.kill(pid, signal.SIGKILL)
        if victim != SERVE:
            time.sleep(0.2)  # it may be replaced
            found.process.send_signal(signal.SIGTERM)
        soon(lambda: found.process.poll() is not None and not found.processes(), found)
        assert found.files() == [], f"of {used}"
        assert not [path for path in set(SHARED.iterdir()) - before if "moesaic" in path.name]
        assert "unix socket" not in found.log.read_text().lower(), "the path is too long"


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "victim", "moment"), CASES)
def test_nothing_stays(flags: tuple[str, ...], victim: str, moment: float, tmp_path: Path) -> None:
    kill_and_look(flags, victim, moment, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("flags", "victim", "moment"), MORE)
def test_nothing_stays_at_other_moments(
    flags: tuple[str, ...], victim: str, moment: float, tmp_path: Path
) -> None:
    kill_and_look(flags, victim, moment, tmp_path)


@pytest.mark.slow
def test_no_part_of_a_trace_stays_of_a_process_that_was_killed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with service(SERVERS, tmp_path, ("--trace", str(trace))) as found:
        soon(lambda: found.ready, found)
        os.kill(found.processes(SERVER)[0], signal.SIGKILL)
        soon(lambda: found.processes(SERVER), found)
        found.process.send_signal(signal.SIGTERM)
        soon(lambda: found.process.poll() is not None and not found.processes(), found)
        assert trace.stat().st_size > 100 and sorted(tmp_path.glob("trace*")) == [trace]
        assert found.files() == []
