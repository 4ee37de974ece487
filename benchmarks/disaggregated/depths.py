"""How many rows wait at each place of an asynchronous worker, over time: sampled in the worker's own process.

A thread looks at the brain's queues every SAMPLE_SECONDS and appends a line to a file. It reads the counts
that the brain keeps anyway, so the loop is not touched. `sampled_worker` is the program of a worker with it.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

from moesaic.cluster import local
from moesaic.config import WorkerConfig
from moesaic.policy.brain.asynchronous import Asynchronous

FOLDER = "MOESAIC_DEPTHS"
"""Environment variable: where each worker writes what it saw."""
SAMPLE_SECONDS = 0.05

Sample = tuple[float, list[int]]
"""A moment on the monotonic clock, which all processes of a machine share, and the rows of each place."""


# ---- in the worker


def watch_worker() -> None:
    """Sample every asynchronous brain that this process makes from now on."""
    make = Asynchronous.__init__

    @functools.wraps(make)
    def watched(brain: Asynchronous, *arguments: Any, **more: Any) -> None:
        make(brain, *arguments, **more)
        file = file_of(Path(os.environ[FOLDER]), os.getpid())
        start(file, lambda: brain._ready.tokens[:, 0].tolist())

    Asynchronous.__init__ = watched  # type: ignore[method-assign]


def start(file: Path, look: Callable[[], list[int]]) -> None:
    """Append what `look` returns, every SAMPLE_SECONDS, until the process ends."""

    def sample() -> None:
        with file.open("a") as lines:
            while True:
                write(lines, (time.monotonic(), look()))
                time.sleep(SAMPLE_SECONDS)

    threading.Thread(target=sample, name="depths", daemon=True).start()


def write(lines: TextIO, sample: Sample) -> None:
    lines.write(json.dumps(sample) + "\n")
    lines.flush()


def file_of(folder: Path, pid: int) -> Path:
    return folder / f"depths-{pid}.jsonl"


# ---- in the benchmark


@contextmanager
def sampled(folder: Path) -> Iterator[None]:
    """Attention workers that are started inside are sampled into `folder`."""

    def worker(config: WorkerConfig) -> local.ChildProcess:
        return local._spawn("disaggregated.sampled_worker", config.to_json(), "worker process")

    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with patch.dict(os.environ, environment), patch("moesaic.cluster.members.spawn_worker", worker):
        yield


def read(folder: Path, pid: int) -> list[Sample]:
    """All that this worker has seen so far; a line that is being written is left out."""
    lines = file_of(folder, pid).read_text().splitlines(keepends=True)
    samples = (json.loads(line) for line in lines if line.endswith("\n"))
    return [(moment, rows) for moment, rows in samples]


def binned(
    workers: Sequence[Sequence[Sample]], begin: float, seconds: float, width: float
) -> list[list[float]]:
    """Mean rows by time and place: an entry for each `width` seconds from `begin` on, summed over workers.

    Where a worker took no sample, because others had its core, its last one stands.
    Example: samples (0.0, [2]), (0.1, [4]), (0.3, [8]), begin 0, seconds 0.6, width 0.2 -> [[3], [8], [8]].
    """
    count = round(seconds / width)
    places = max(len(rows) for samples in workers for _, rows in samples)
    total = [[0.0] * places for _ in range(count)]
    for samples in workers:
        seen: list[list[list[int]]] = [[] for _ in range(count)]
        for moment, rows in samples:
            number = int((moment - begin) // width)
            if 0 <= number < count:
                seen[number].append(rows)
        last = [0.0] * places
        for number, these in enumerate(seen):
            if these:
                last = [sum(column) / len(these) for column in zip(*these, strict=True)]
            total[number] = [a + b for a, b in zip(total[number], last, strict=True)]
    return total
