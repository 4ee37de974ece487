"""How many rows wait at each place of an asynchronous worker, over time: measured in the worker's process.

Whenever the scheduler hears of an event, the time since the last one counts for the rows that waited
meanwhile; a thread writes down the means since its last look, every SAMPLE_SECONDS. (A thread that only
looked at the queues would see them when the loop lets go of the interpreter, and at no other moments.)
`sampled_worker` is the program of a worker with this in it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import numpy as np

from moesaic.cluster import local
from moesaic.config import WorkerConfig
from moesaic.policy.scheduling.microqueue import FloatArray
from moesaic.policy.scheduling.schedulers.actions import Action, Event
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler

FOLDER = "MOESAIC_DEPTHS"
"""Environment variable with the folder in which each worker writes its samples."""
SAMPLE_SECONDS = 0.05

Sample = tuple[float, list[float]]
"""(moment on the monotonic clock that all processes of a machine share, rows at each place)."""


# ---- in the worker


class Watched:
    """The queue depths of one scheduler. One thread reports changes, another one asks."""

    def __init__(self, scheduler: AsyncScheduler, now: float) -> None:
        self._ready = scheduler._ready
        self._seen: tuple[FloatArray, float] = (np.zeros(len(self._ready.tokens)), now)
        """Row-seconds of each place, and the time up to which they count. Both are replaced at once, for the
        thread that asks."""
        self._asked = self._seen

    def before_change(self, now: float) -> None:
        """The queues will change now."""
        self._seen = self._counted(now)

    def ask(self, now: float) -> Sample:
        """The means since the last call, and the middle of that time."""
        area, since = self._asked
        self._asked = self._counted(now)
        means = (self._asked[0] - area) / max(now - since, 1e-9)
        return (since + now) / 2, [round(float(mean), 3) for mean in means]

    def _counted(self, now: float) -> tuple[FloatArray, float]:
        area, since = self._seen
        return area + self._ready.tokens[:, 0] * (now - since), now


def watch_worker() -> None:
    """Watch every asynchronous scheduler that this process makes from now on."""
    make, handle = AsyncScheduler.__init__, AsyncScheduler.handle
    watches: dict[AsyncScheduler, Watched] = {}

    def made(scheduler: AsyncScheduler, *arguments: Any, **more: Any) -> None:
        make(scheduler, *arguments, **more)
        watches[scheduler] = Watched(scheduler, time.monotonic())
        start(file_of(Path(os.environ[FOLDER]), os.getpid()), watches[scheduler])

    def handled(scheduler: AsyncScheduler, event: Event, now: float) -> list[Action]:
        watches[scheduler].before_change(time.monotonic())
        return handle(scheduler, event, now)

    AsyncScheduler.__init__ = made  # type: ignore[assignment, method-assign]
    AsyncScheduler.handle = handled  # type: ignore[assignment, method-assign]


def start(file: Path, watched: Watched) -> None:
    """Append the new samples every SAMPLE_SECONDS until the process ends."""

    def sample() -> None:
        with file.open("a") as lines:
            while True:
                time.sleep(SAMPLE_SECONDS)
                write(lines, watched.ask(time.monotonic()))

    threading.Thread(target=sample, name="depths", daemon=True).start()


def write(lines: TextIO, sample: Sample) -> None:
    lines.write(json.dumps(sample) + "\n")
    lines.flush()


def file_of(folder: Path, pid: int) -> Path:
    return folder / f"depths-{pid}.jsonl"


# ---- in the benchmark


@contextmanager
def sampled(folder: Path) -> Iterator[None]:
    """Samples the attention workers that are started inside the context into `folder`."""

    def worker(config: WorkerConfig) -> local.ChildProcess:
        return local.spawn_process(
            "disaggregated.sampled_worker", config.to_json(), "worker process", Path(config.model.model)
        )

    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with patch.dict(os.environ, environment), patch("moesaic.cluster.launcher.spawn_worker", worker):
        yield


def read(folder: Path, pid: int) -> list[Sample]:
    """All samples of this worker so far. An unfinished line is left out."""
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
    segments = max(len(rows) for samples in workers for _, rows in samples)
    total = [[0.0] * segments for _ in range(count)]
    for samples in workers:
        seen: list[list[list[float]]] = [[] for _ in range(count)]
        for moment, rows in samples:
            number = int((moment - begin) // width)
            if 0 <= number < count:
                seen[number].append(rows)
        last = [0.0] * segments
        for number, these in enumerate(seen):
            if these:
                last = [sum(column) / len(these) for column in zip(*these, strict=True)]
            total[number] = [a + b for a, b in zip(total[number], last, strict=True)]
    return total
