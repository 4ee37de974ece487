"""Threads for chat templates and for long texts, so that neither the event loop nor other work waits."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from moesaic.core.errors import OverloadedError

T = TypeVar("T")
IN_TEMPLATE = "other conversations take their time in the chat template"
IN_TOKENIZER = "other long texts are in the tokenizer"


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    result: Future[Any]
    deadline: float
    """Time at which it is too late to start, on the monotonic clock."""


class ChatThreads:
    """`count` threads, started at the first job. They end with this object and keep no process alive.

    patience: seconds that a job may wait for a thread. busy: why it had to wait for longer, in words.
    """

    def __init__(self, count: int, patience: float = 10.0, busy: str = IN_TEMPLATE) -> None:
        self._count = count
        self._busy = busy
        self._patience = patience
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._has_started = False
        weakref.finalize(self, _end, self._jobs, count)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which a thread calls. A cancelled call that has not begun never begins.

        Raises OverloadedError if no thread was free for `patience` seconds.
        """
        if not self._has_started:
            self._has_started = True
            for _ in range(self._count):
                threading.Thread(
                    target=_serve, args=(self._jobs, self._busy), name="chat", daemon=True
                ).start()
        result: Future[T] = Future()
        self._jobs.put(_Job(work, result, time.monotonic() + self._patience))
        return await asyncio.wrap_future(result)


def _serve(jobs: SimpleQueue[_Job | None], busy: str) -> None:
    while (job := jobs.get()) is not None:
        _run_job(job, busy)
        del job  # while this thread waits, it keeps nothing of the last job alive, such as its ChatThreads


def _run_job(job: _Job, busy: str) -> None:
    if not job.result.set_running_or_notify_cancel():
        return
    if time.monotonic() > job.deadline:
        job.result.set_exception(OverloadedError(f"{busy}; try again later", retry_after=5.0))
        return
    try:
        value = job.work()
    except BaseException as error:
        job.result.set_exception(error)
        if not isinstance(error, Exception):  # such as SystemExit, which is to end the thread
            raise
    else:
        job.result.set_result(value)


def _end(jobs: SimpleQueue[_Job | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)
