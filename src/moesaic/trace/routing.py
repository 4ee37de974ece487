"""Records routing while requests are served: attention workers write files, which are collected in a profile.

For a profile FILE, each worker writes to the folder FILE.parts

    memory                              value of --record-routing-memory, for workers whose model needs more
    attention-worker-0.1.json           its model
    attention-worker-0.1.000000.rows    records of `core.routing`, then .000001.rows and so on

The process that started the workers collects them. It removes a file of rows once it has read all of it.
The files are memory-mapped, so a killed worker leaves all that it has written.

The rows of a request may be those of several workers: of a prefill worker and of the one that went on, or of
a worker that died and of its successor. They have one id, so a row that was computed again counts once. The
engine says when such a request ended (`Ends`). A single worker writes that down itself.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from moesaic.config import parse_bytes
from moesaic.core.errors import ConfigError
from moesaic.core.request import Request
from moesaic.core.routing import END_POSITION, Assembly, RoutedModel, Rows, ending
from moesaic.core.tally import Tally
from moesaic.trace.live_routing import LiveRouting
from moesaic.trace.options import RecordConfig
from moesaic.trace.parts import new_file, parts_folder, trace_path

LOG = logging.getLogger(__name__)
MEMORY = "memory"
"""Name of the file with the memory limit."""
WINDOW = 1 << 22
"""Bytes of a file of rows."""
INTERVAL = 60.0
"""Seconds between two updates of the profile."""
OPEN_SHARE = 0.25
"""Share of the memory for rows of requests that have not ended."""


class RowFile:
    """A RowSink that writes the files of one worker. A full disk ends the recording, not the worker."""

    def __init__(self, part: Path, model: RoutedModel) -> None:
        """part: the .json file (see `parts.part_path`), in a folder made by `prepare`.

        Raises ConfigError if it cannot be written, or if the memory is too small for the model's counts.
        """
        self._part = part
        self._kind = model.row
        self._capacity = _capacity(model)
        self._number = -1
        self._next_row = 0
        self._window: Rows | None = None
        try:
            _check_memory(model, part.with_name(MEMORY).read_text(encoding="utf-8"))
            self._open_next()
            unfinished_file = part.with_suffix(".tmp")
            unfinished_file.write_text(json.dumps(asdict(model)), encoding="utf-8")
            unfinished_file.replace(part)
        except OSError as error:
            raise ConfigError.field(
                "--record-routing", trace_path(str(part)), f"a file to write into ({error.strerror})"
            ) from error

    def __call__(self, rows: Rows) -> None:
        while len(rows) and self._window is not None:
            fitting = rows[: self._capacity - self._next_row]
            target = self._window[self._next_row : self._next_row + len(fitting)]
            for name in self._kind.names or ():  # the request id last: it marks the record as complete
                target[name] = fitting[name]
            self._next_row += len(fitting)
            rows = rows[len(fitting) :]
            if self._next_row == self._capacity:
                self._open_next_or_stop()

    def _open_next_or_stop(self) -> None:
        try:
            self._open_next()
        except OSError as error:
            self._window = None
            LOG.warning("%s: %s; this worker's routing ends here", self._part, error.strerror)

    def _open_next(self) -> None:
        """Opens the next file. It is written before it is mapped; else a full disk would kill the process."""
        self._number, self._next_row, self._window = self._number + 1, 0, None
        path = _rows_path(self._part, self._number)
        blank = memoryview(bytes(self._capacity * self._kind.itemsize))
        file = new_file(path, 0o600)  # rows have token ids, from which the texts of users follow
        try:
            num_written = 0
            while num_written < len(blank):
                num_written += os.write(file, blank[num_written:])
            self._window = np.frombuffer(mmap.mmap(file, len(blank)), self._kind)
        finally:
            os.close(file)


@dataclass
class _Part:
    """How far the files of a worker have been read."""

    path: Path
    file: int = 0
    next_row: int = 0


class Ends:
    """Requests that ended since the last `take`. One thread adds, another takes."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, int, bool]] = SimpleQueue()
        self._late_requests: list[tuple[int, int]] = []

    def add(self, request: Request, late: bool) -> None:
        """A request ended, and its workers have handed over its rows. late: they will do so soon."""
        self._queue.put((request.request_id, len(request.prompt_token_ids), late))

    def take(self, last: bool = False) -> list[tuple[int, int]]:
        """Requests whose rows were handed over, each with the tokens of its prompt.

        Late ones come only at the call after. last: all come.
        """
        ended_requests, self._late_requests = self._late_requests, []
        for _ in range(self._queue.qsize()):
            request, prompt, late = self._queue.get()
            (self._late_requests if late and not last else ended_requests).append((request, prompt))
        return ended_requests


class Collector:
    """Reads what the workers write and makes a profile of it. Used by one thread at a time."""

    def __init__(
        self, file: Path, most_bytes: int, live: LiveRouting | None = None, ends: Ends | None = None
    ) -> None:
        """live: gets every request that ended, too. ends: says which ones did; None: the worker writes it."""
        self._live = live
        self._ends = ends
        self._ended_requests: list[tuple[int, int]] = []
        self._file = file
        self._max_bytes = most_bytes
        self._parts: dict[Path, _Part] = {}
        self._model: RoutedModel | None = None
        self._assembly: Assembly | None = None
        self._tally: Tally | None = None
        self._num_saved = 0

    def collect(self, last: bool = False) -> None:
        """Reads everything written so far. last: no worker will write anything more."""
        if self._ends is not None:
            self._ended_requests += self._ends.take(last)  # before any row is read: theirs are written by now
        for path in sorted(parts_folder(self._file).glob("*.json")):
            part = self._parts.setdefault(path, _Part(path))
            model = self._model = self._model or _read_model(path)
            self._assembly = self._assembly or Assembly(model, int(OPEN_SHARE * self._max_bytes))
            self._tally = self._tally or _tally(model, self._max_bytes)
            for rows in _unread(part, model):
                self._assembly.add(rows if self._ends is None else rows[rows["position"] != END_POSITION])
                if self._assembly.is_full:
                    self._count(self._assembly, self._tally)
        if self._assembly is not None and self._tally is not None and self._model is not None:
            for request, prompt in self._ended_requests:
                self._assembly.add(ending(self._model, request, prompt))
            self._ended_requests = []
            self._count(self._assembly, self._tally)

    def _count(self, assembly: Assembly, tally: Tally) -> None:
        routes = assembly.take()[1]
        tally.add(routes)
        if self._live is not None and self._model is not None and routes.requests:
            self._live.add(self._model, routes)

    def save(self, last: bool = False) -> None:
        """Writes the profile if there is anything new. last: compress it."""
        tally = self._tally
        if tally is not None and tally.requests and (last or tally.requests > self._num_saved):
            tally.profile().save(self._file, compress=last)
            self._num_saved = tally.requests

    def sum_up(self, share: float) -> None:
        """Logs what the profile lacks, if a worker wrote anything. share: of --record-routing-share."""
        if self._tally is None or self._assembly is None:
            return
        left_out = self._tally.left_out + self._assembly.num_discarded
        if left_out:
            LOG.warning("--record-routing-memory was full: %d requests were not counted", left_out)
        if not self._tally.requests:
            reason = (
                f"--record-routing-share {share:g} took none of those that ended (it takes eight in a row)"
            )
            reason = "see above" if left_out else reason
            LOG.warning("no request was recorded, %s was not written: %s", self._file, reason)


@contextmanager
def recording(
    config: RecordConfig,
    interval: float = INTERVAL,
    live: LiveRouting | None = None,
    ends: Ends | None = None,
) -> Iterator[str | None]:
    """Records the routing of the block's workers. Yields the file, which may be one that nobody keeps.

    A thread updates the profile every `interval` seconds, and the end of the block does too. live: gets the
    requests that ended, more often. None and no file in `config`: nothing is recorded. ends: says which
    requests ended; None: one worker does. Raises ConfigError, before the block, if the file cannot be
    written.
    """
    if config.record_routing is None and live is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="moesaic-routing-") as folder:
        file = Path(config.record_routing or Path(folder) / "live.npz")
        prepare(file, config.record_routing_memory)
        look_interval = interval if live is None else min(interval, live.interval)
        collector = Collector(file, config.most_bytes, live, ends)
        with _collecting(collector, file, config, look_interval, round(interval / look_interval)):
            yield str(file)


@contextmanager
def _collecting(
    collector: Collector, file: Path, config: RecordConfig, interval: float, save_every: int
) -> Iterator[None]:
    """Collects what the block's workers write for the profile `file`. interval, save_every: see
    `_keep_up`."""
    stop_event = threading.Event()
    arguments = (collector, stop_event, interval, save_every)
    thread = threading.Thread(target=_keep_up, args=arguments, name="routing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
        try:
            collector.collect(last=True)
            collector.save(last=True)
            if config.record_routing is not None:
                collector.sum_up(config.record_routing_share)
            _clear(parts_folder(file))
            parts_folder(file).rmdir()
            if not file.stat().st_size:  # no request was recorded
                file.unlink()
        except OSError as error:
            LOG.warning("%s: %s; what was recorded is in %s", file, error.strerror, parts_folder(file))


def _keep_up(collector: Collector, stop_event: threading.Event, interval: float, save_every: int) -> None:
    """Collects every `interval` seconds until `stop_event`, and saves each `save_every`-th time."""
    times = 0
    while not stop_event.wait(interval):
        times += 1
        try:
            collector.collect()
            if times % save_every == 0:
                collector.save()
        except OSError as error:
            LOG.warning("--record-routing: %s", error)


def _check_memory(model: RoutedModel, memory: str) -> None:
    """Raises ConfigError if the memory is too small for the empty counts."""
    if _tally(model, parse_bytes("--record-routing-memory", memory)).is_full:
        requirement = "more: the empty counts of this model need it"
        raise ConfigError.field("--record-routing-memory", memory, requirement)


def _tally(model: RoutedModel, most_bytes: int) -> Tally:
    """Returns a tally that uses the memory left beside rows of open requests."""
    return Tally(model, most_bytes - int(OPEN_SHARE * most_bytes))


def _capacity(model: RoutedModel) -> int:
    """Returns the number of records in a file."""
    return max(1, WINDOW // model.row.itemsize)


def _rows_path(part: Path, number: int) -> Path:
    """Example: p.npz.parts/attention-worker-0.1.json, 2 -> p.npz.parts/attention-worker-0.1.000002.rows"""
    return part.with_suffix(f".{number:06}.rows")


def _read_model(part: Path) -> RoutedModel:
    fields = json.loads(part.read_text(encoding="utf-8"))
    return RoutedModel(**fields | {"layers": tuple(fields["layers"])})


def _unread(part: _Part, model: RoutedModel) -> Iterator[Rows]:
    """Yields new rows of a part, file by file."""
    path = _rows_path(part.path, part.file)
    while path.is_file():
        rows = np.fromfile(path, model.row, offset=part.next_row * model.row.itemsize)
        blank = np.flatnonzero(rows["request"] == 0)
        rows = rows[: blank[0] if len(blank) else None]
        part.next_row += len(rows)
        yield rows
        if part.next_row < _capacity(model):  # the worker has not begun the next file
            return
        path.unlink()
        part.file, part.next_row = part.file + 1, 0
        path = _rows_path(part.path, part.file)


def prepare(file: Path, memory: str) -> None:
    """Makes an empty folder for the parts of the profile `file`. Removes parts of a killed run.

    memory: value of --record-routing-memory. Raises ConfigError if the folder cannot be made.
    """
    try:
        file.open("ab").close()
        folder = parts_folder(file)
        folder.mkdir(mode=0o700, exist_ok=True)
        _clear(folder)
        (folder / MEMORY).write_text(memory, encoding="utf-8")
    except OSError as error:
        requirement = f"a file to write into ({error.strerror})"
        raise ConfigError.field("--record-routing", str(file), requirement) from error


def _clear(folder: Path) -> None:
    for pattern in ("*.json", "*.rows", "*.tmp", MEMORY):
        for old_file in folder.glob(pattern):
            old_file.unlink()
