"""Reads matrices of a checkpoint in several threads.

Question: Which threads read and convert experts when a model is loaded?
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moesaic.runtime.machine import cores

Key = TypeVar("Key")
Content = TypeVar("Content")

MAX_THREADS = 4
"""Threads at most. Each takes memory for an expert and for its conversion."""


def read_each(read: Callable[[Key], Content], keys: Iterable[Key]) -> Iterator[Content]:
    """What `read` returns for each key, in the order of the keys.

    It runs in up to MAX_THREADS threads, at most one for each core that the process may use. That helps
    where it converts with numpy or waits for a disk. The first error in the order of the keys is raised, and
    no further key is read then.

    >>> list(read_each(lambda key: key * key, [1, 2, 3]))
    [1, 4, 9]
    """
    threads = min(cores(), MAX_THREADS)
    if threads == 1:
        yield from map(read, keys)
        return
    remaining_keys = iter(keys)
    pool = ThreadPoolExecutor(threads, "read-checkpoint")
    try:
        futures = deque(pool.submit(read, key) for key in itertools.islice(remaining_keys, threads + 1))
        while futures:
            yield futures.popleft().result()
            futures.extend(pool.submit(read, key) for key in itertools.islice(remaining_keys, 1))
    finally:
        pool.shutdown(cancel_futures=True)
