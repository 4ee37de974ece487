"""The process of one model: it serves the whole API on a Unix socket that only this user can reach."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)

MODULE = "moesaic.commands.served_model"
STOP_SECONDS = 30.0
"""Seconds that a process without requests has to end after SIGTERM. Then it is killed."""
LONGEST_LINE = 1 << 24
"""Maximum bytes of a line that a process prints. What a large cluster says of itself has some 100 KB."""


@dataclass(frozen=True)
class ProcessStart:
    """What a model's process is started with."""

    name: str
    """The model's name, for people who look at the list of processes."""
    settings: bytes
    """What it reads from its standard input."""
    socket: Path
    """Where it listens."""
    environment: Mapping[str, str]
    key: str
    """The key that its server asks for before it changes its processes."""
    describe_exit: Callable[[int], str]
    """Says how a process ended, by its return code."""


class ModelProcess:
    """A running process. It ends when its standard input does, so it never outlives this one."""

    def __init__(self, start: ProcessStart, process: asyncio.subprocess.Process) -> None:
        self.socket = start.socket
        self.key = start.key
        self.pid = process.pid
        self.exit_code: int | None = None
        self.info: dict[str, Any] = {}
        """What the process says of its model once it serves."""
        self.end_event = asyncio.Event()
        self._start = start
        self._process = process
        self._is_ready = asyncio.Event()
        self._failure = ""
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def launch(cls, start: ProcessStart) -> ModelProcess:
        """Start a process, which loads its model."""
        start.socket.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, start.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(start.environment),
            limit=LONGEST_LINE,
            start_new_session=True,  # Ctrl-C reaches the front only, which drains
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended, which `_watch` sees
            process.stdin.write(start.settings)
            await process.stdin.drain()
        return cls(start, process)

    async def wait_ready(self) -> bool:
        """Wait until the model is loaded. False if the process ended before."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._is_ready, self.end_event)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self.end_event.is_set()

    def describe_end(self) -> str:
        """Why the process ended, or how."""
        if self._failure:
            return self._failure
        code = 0 if self.exit_code is None else self.exit_code
        return f"process {self.pid} {self._start.describe_exit(code)}"

    async def stop(self) -> None:
        """End the process, and wait for that."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.end_event.wait()
        except TimeoutError:
            LOG.warning("the process of %s did not end, and is killed", self._start.name)
            self.kill()
            await self.end_event.wait()

    def kill(self) -> None:
        """Kill the process now. Its own workers end by themselves."""
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        if not self.end_event.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def _watch(self) -> None:
        """Read what the process prints, until it has ended."""
        reading = asyncio.create_task(self._read())
        self.exit_code = await self._process.wait()
        # A worker that has not ended yet holds the pipe open; what the process said itself is there already.
        await asyncio.wait([reading], timeout=0.5)
        reading.cancel()
        self.end_event.set()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            record = _parse(line)
            match record.get("event"):
                case "serving":
                    self.info = record
                    self._is_ready.set()
                case "failed":
                    self._failure = str(record.get("error"))
                case _:
                    sys.stderr.buffer.write(line)  # of a library


def _parse(line: bytes) -> dict[str, Any]:
    """The record in a line. Empty for what is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
