"""Child processes that try cases: each case with a limit, and the last lines of a process that failed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from scripts.gpu.plan import ROOT, Found, Part, Work, problem

LINES = 30
"""Last lines of a process that failed, which the report keeps."""
LEAVING = 5
"""Seconds to wait for a killed process. One that hangs in the driver may never end."""
Tell = Callable[[str, Found], None]
"""Called with the name and the result of each case."""


class Child:
    """A process of its own group that tries cases, one at a time."""

    def __init__(self, work: Work) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", work.child, json.dumps(asdict(work))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, cwd=ROOT, process_group=0,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def ask(self, part: str, case: str, seconds: float) -> Found:
        """The result of a case. If there is none: an error and the last lines, and the process has ended."""
        deadline = time.monotonic() + seconds
        try:
            answer = self._answer(json.dumps({"part": part, "case": case}), deadline)
            found = json.loads(answer) if answer else self._broken()
        except TimeoutError:
            found = problem(f"did not end within {seconds:.0f} s")
        except OSError:
            found = self._broken()
        if "error" in found:
            self.end()
            found["last lines"] = self.last_lines()
        return dict(found)

    def _answer(self, line: str, deadline: float) -> bytes:
        """The line that the process answers; nothing if it ended. Raises TimeoutError."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None
        to.write(f"{line}\n".encode())
        to.flush()
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([back], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            more = os.read(back.fileno(), 1 << 16)
            if not more:
                return b""
            answer += more
        return answer

    def _broken(self) -> Found:
        try:
            code = self._process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            return problem("closed its output and did not end")
        return problem(f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")

    def last_lines(self) -> list[str]:
        """The last lines that the process and those that it started wrote."""
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - (1 << 16)))
        text = self._said.read().decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-LINES:]

    def close(self) -> None:
        """End the process, and forget what it wrote."""
        self.end()
        for file in (self._process.stdin, self._process.stdout, self._said):
            with suppress(OSError):  # of a line that the process did not read
                if file is not None:
                    file.close()

    def end(self) -> None:
        """Kill the process and those that it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(LEAVING)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def run_part(name: str, part: Part, cases: Sequence[str], work: Work, seconds: float, tell: Tell) -> None:
    """Try the cases within so many seconds, and tell each result.

    A case that fails, hangs or takes its process with it costs no other one: the next gets a new process.
    """
    waiting, lock, deadline = list(cases), threading.Lock(), time.monotonic() + seconds

    def serve() -> None:
        child: Child | None = None
        while True:
            with lock:
                case = waiting.pop(0) if waiting else None
            if case is None:
                break
            begun, left = time.monotonic(), deadline - time.monotonic()
            if left < 1:
                found = problem("no time was left")
            else:
                child = child or Child(work)
                found = child.ask(name, case, min(part.each, left))
                if part.fresh or "error" in found:
                    child.close()
                    child = None
            with lock:
                tell(case, found | {"seconds": round(time.monotonic() - begun, 1)})
        if child is not None:
            child.close()

    threads = [threading.Thread(target=serve) for _ in range(min(part.processes(), len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
