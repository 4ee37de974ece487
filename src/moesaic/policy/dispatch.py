"""Request -> attention worker: where it stays for life, its KV cache with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerLoad:
    """What dispatch knows of a worker."""

    total_blocks: int
    used_blocks: int
    """By the requests that were given to it and have not ended, their prompts and generated tokens."""
    requests: int

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


def least_loaded(workers: Mapping[int, WorkerLoad]) -> int:
    """The worker with the most free KV blocks; of equal ones the one with fewer requests, then the lower id.

    The rule of the code behind Asynchronous Expert Parallelism, without its need to know output lengths.
    Raises ValueError when there is no worker.
    """
    return min(workers, key=lambda worker: (-workers[worker].free_blocks, workers[worker].requests, worker))
