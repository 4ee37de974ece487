"""A renderer's process: compiles one chat template, then renders it for one request after another.

Its standard input is a socket to its parent, and its standard output a second one, on which nothing is sent.
It imports Jinja and little else.

Question: What may a chat template do, and how long may it take?
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jinja2

from moesaic.text.templates import frames, jinja_template

_CONNECTION = 0
"""File descriptor of the socket."""
_HANGUP = 1
"""File descriptor of the socket that only tells that the parent has closed its end. A signal for the other
socket can also come from data: a sender may tell of them after the receiver has read them."""
_READ_BYTES = 1 << 20
"""Maximum number of bytes that are read at a time."""
_COPIES = 32
"""Bytes of memory for each byte of a request: a character takes up to four, and a text is copied often."""
_STATM = Path("/proc/self/statm")
"""Linux's numbers of this process's pages. Elsewhere memory has no limit."""
_GRACE_SECONDS = 1.0
"""Seconds after its limit at which a renderer ends by itself. Its parent has ended it by then."""


def serve(seconds: float, memory: int) -> int:
    """Serve the parent until it closes the socket. Returns the exit code.

    seconds, memory: the limits of one piece of work; bytes beyond what the process has now.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):  # a service manager may signal all processes of a service
        signal.signal(signum, signal.SIG_IGN)
    # No template may make the process write a file.
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    fcntl.fcntl(_HANGUP, fcntl.F_SETOWN, os.getpid())
    null_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_file, 2)  # no template may fill the parent's log
    os.close(null_file)
    try:
        _send(frames.pack(frames.STARTED))
        source = _receive().decode(*frames.CODING)
        templates: list[jinja2.Template] = []

        def compile_source() -> str:
            templates.append(jinja_template.compile_template(source))
            return ""

        _send(_answer(compile_source, _Limits(seconds, memory), len(source)))
        limits = _Limits(seconds, memory)
        while True:
            _answer_next(templates[0], limits)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0


def _answer_next(template: jinja2.Template, limits: _Limits) -> None:
    body = _receive()

    def render() -> str:
        request = json.loads(body.decode(*frames.CODING))
        return jinja_template.render_template(template, request["variables"], request["most"])

    _send(_answer(render, limits, len(body)))


def _answer(work: Callable[[], str], limits: _Limits, size: int) -> bytes:
    """The message that says what `work` returned or raised, within `limits` for a request of `size` bytes."""
    try:
        with limits.enforce(size):
            return frames.pack(frames.DONE, work().encode(*frames.CODING))
    except jinja_template.TemplateRefused as error:
        return frames.pack(frames.REFUSED, str(error).encode(*frames.CODING))
    except jinja_template.TooLong:
        return frames.pack(frames.TOO_LONG)
    except MemoryError:
        return frames.pack(frames.NO_MEMORY)


class _Limits:
    """The limits of one piece of work. memory: bytes beyond what the process has now."""

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds = seconds
        self._memory = memory + _address_space() if _STATM.exists() else None
        self._hangup_poll = select.poll()
        self._hangup_poll.register(_HANGUP, select.POLLHUP)
        self._flags = fcntl.fcntl(_HANGUP, fcntl.F_GETFL)

    @contextmanager
    def enforce(self, size: int) -> Iterator[None]:
        """A context with the limits for a request of `size` bytes.

        Two signals end the process, also in the middle of one long operation: SIGALRM after the limit, and
        SIGIO when the parent closes its sockets. Raises EOFError if it has closed them already.
        """
        former_limit = resource.getrlimit(resource.RLIMIT_AS)
        fcntl.fcntl(_HANGUP, fcntl.F_SETFL, self._flags | os.O_ASYNC)
        if self._hangup_poll.poll(0):
            raise EOFError
        signal.setitimer(signal.ITIMER_REAL, self._seconds + _GRACE_SECONDS)
        if self._memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self._memory + _COPIES * size, former_limit[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, former_limit)
            signal.setitimer(signal.ITIMER_REAL, 0)
            fcntl.fcntl(_HANGUP, fcntl.F_SETFL, self._flags)


def _address_space() -> int:
    """Bytes of address space that this process has."""
    pages = int(_STATM.read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _receive() -> bytes:
    """The body of the parent's next message."""
    _, length = frames.HEADER.unpack(_read(frames.HEADER.size))
    return _read(length)


def _read(count: int) -> bytes:
    """Exactly `count` bytes. Raises EOFError if the parent closed the socket."""
    parts: list[bytes] = []
    while count:
        part = os.read(_CONNECTION, min(count, _READ_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(_CONNECTION, remaining) :]
