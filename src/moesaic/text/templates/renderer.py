"""A renderer, as the process that started it sees it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moesaic.config import renderer_environment
from moesaic.core.errors import ConnectionLost, RendererError, TemplateError
from moesaic.text.templates import frames

START_SECONDS = 60.0
"""Seconds for Python to start and to import Jinja."""
_KILL_SECONDS = 5.0
"""Seconds in which a process ends after SIGKILL, unless it waits for a file system that does not answer."""
_PROGRAM = Path(__file__).with_name("__main__.py")
_LONGEST_ERROR = 1 << 16
"""Maximum number of bytes of a message that is not a rendered text."""


@dataclass(frozen=True)
class Limits:
    """The limits of a chat template, for compiling it and for each rendering."""

    seconds: float = 5.0
    """Maximum number of seconds."""
    memory: int = 256 * 2**20
    """Maximum number of bytes of memory, beyond what the process has at its start. A rendering may take
    another 32 bytes for each byte of its request."""
    characters: int = 64 * 2**20
    """Maximum length of a rendered text where the caller knows no smaller one. It is twice the maximum size
    of a request's body."""


class Renderer:
    """The process of a renderer. Its methods block; one thread may use it at a time.

    The process ends when this end of its sockets is closed, by `end` or because this process ended.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        """Start the process and compile `source`.

        Raises TemplateError if the template cannot be compiled within `limits`, and RendererError if no
        process can be started.
        """
        self._limits = limits
        self._connection, process_end = socket.socketpair()
        self._hangup, hangup_end = socket.socketpair()
        path = [str(Path(folder).absolute()) for folder in sys.path]
        settings = {"path": path, "seconds": limits.seconds, "memory": limits.memory}
        try:
            with process_end, hangup_end:
                # -I: neither the environment nor the working directory adds modules.
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    [sys.executable, "-I", str(_PROGRAM), json.dumps(settings)],
                    stdin=process_end.fileno(),
                    stdout=hangup_end.fileno(),
                    env=renderer_environment(),
                    cwd="/",
                    process_group=0,  # Ctrl-C reaches the parent only
                )
        except OSError as error:
            self._close_sockets()
            raise RendererError(f"cannot start the process that renders chat templates: {error}") from error
        try:
            self._compile(source)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def render(self, request: bytes, max_characters: int) -> str:
        """The text of `request`, a message for a renderer. max_characters: its maximum length in characters.

        Raises TemplateError if the template failed, and ConnectionLost if the process ended by itself. Then,
        and after `TemplateError.fatal`, the renderer is of no more use.
        """
        return self._ask(request, self._limits.seconds, max_characters)

    def end(self) -> None:
        """End the process now and wait until it has ended, but not for long where it cannot be killed."""
        self._close_sockets()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_SECONDS)

    def _close_sockets(self) -> None:
        self._connection.close()
        self._hangup.close()

    def _compile(self, source: str) -> None:
        try:
            kind, _ = self._receive(time.monotonic() + START_SECONDS, 0)
        except (ConnectionLost, TimeoutError) as error:
            raise RendererError(f"{error} before it was ready to render chat templates") from error
        assert kind == frames.STARTED
        try:
            self._ask(frames.pack(frames.SOURCE, source.encode(*frames.CODING)), self._limits.seconds, 0)
        except ConnectionLost as lost:
            raise TemplateError(f"ended the process that compiled it: {lost}", fatal=True) from lost

    def _ask(self, message: bytes, seconds: float, max_characters: int) -> str:
        deadline = time.monotonic() + seconds
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_receive` says how it ended
                self._connection.settimeout(seconds)
                self._connection.sendall(message)
            kind, body = self._receive(deadline, 4 * max_characters)
        except TimeoutError:
            message_ = f"ran for more than {seconds:g} seconds and was stopped"
            raise TemplateError(message_, fatal=True) from None
        except OSError as error:  # another thread has closed the socket
            raise ConnectionLost(f"process {self.pid} has been ended") from error
        text = body.decode(*frames.CODING)
        match kind:
            case frames.DONE:
                return text
            case frames.REFUSED:
                raise TemplateError(text, is_refusal=True)
            case frames.TOO_LONG:
                raise TemplateError(f"made more than {max_characters} characters of text", too_long=True)
            case frames.NO_MEMORY:
                memory = self._limits.memory >> 20
                raise TemplateError(f"needed more than {memory} MiB of memory and was stopped", fatal=True)
        raise ConnectionLost(f"process {self.pid} sent invalid data")

    def _receive(self, deadline: float, longest: int) -> tuple[bytes, bytes]:
        """Kind and body of the next message.

        Raises TimeoutError at `deadline`, and ConnectionLost if the process ended or sent a body of more than
        `longest` bytes, or 64 KiB.
        """
        kind, length = frames.HEADER.unpack(self._read(frames.HEADER.size, deadline))
        if length > max(longest, _LONGEST_ERROR):
            raise ConnectionLost(f"process {self.pid} sent invalid data")
        return kind, self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        buffer = bytearray(count)
        remaining = memoryview(buffer)
        while remaining:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                got = self._connection.recv_into(remaining)
            except ConnectionResetError:  # a killed process may leave unread data behind
                got = 0
            if not got:
                raise ConnectionLost(self._describe_end())
            remaining = remaining[got:]
        return bytes(buffer)

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"process {self.pid} closed its socket"
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"process {self.pid} {ending}"
