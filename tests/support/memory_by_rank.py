"""Counts the memory of the sanitizer's device that each rank of a group takes, where ranks are threads."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, current_thread
from unittest import mock

from tests.support.gpu_sanitizer import TAKEN
from tests.support.thread_groups import RANK


class Shares:
    """Bytes of each rank since the start. Memory belongs to the rank whose thread, or a thread that it
    started, took it."""

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        self._now, self.most = Counter[int](), Counter[int]()

    def tell(self, storage: int, size: int) -> None:
        """Handles one report, see Taken."""
        if size > 0:
            self._owner[storage] = rank_of_thread()
        owner = self._owner.get(storage)
        if owner is None:
            return  # it was there before
        self._now[owner] += size
        self.most[owner] = max(self.most[owner], self._now[owner])
        if size < 0:
            del self._owner[storage]


@contextmanager
def shares() -> Iterator[Shares]:
    """Counts the memory of groups that start inside the context."""
    gc.collect()  # what other tests took
    counted, start = Shares(), Thread.start

    def inherited(thread: Thread) -> None:
        if not thread.name.startswith(RANK):
            thread.__dict__["rank"] = rank_of_thread()
        start(thread)

    with mock.patch.object(TAKEN, "tell", counted.tell), mock.patch.object(Thread, "start", inherited):
        yield counted


def rank_of_thread() -> int:
    """The rank of this thread. 0 if there are no ranks."""
    thread = current_thread()
    if thread.name.startswith(RANK):
        return int(thread.name.removeprefix(RANK))
    rank: int = thread.__dict__.get("rank", 0)
    return rank
