"""Reads matrices of a checkpoint with all cores of the process.

Question: Which threads read and convert experts when a model is loaded?
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Content = TypeVar("Content")


def read_each(read: Callable[[Key], Content], keys: Iterable[Key]) -> Iterator[Content]:
    """What `read` returns for each key, in the order of the keys.

    It runs in as many threads as the process has cores, which helps where it converts with numpy or waits
    for a disk. Few keys are read before they are taken, since that uses memory. The first error in the order
    of the keys is raised, and no further key is read then.

    >>> list(read_each(lambda key: key * key, [1, 2, 3]))
    [1, 4, 9]
    """
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
