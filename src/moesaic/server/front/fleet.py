"""The models of one server: starts and ends their processes as `ModelPool` decides.

Question: What happens between a request for a model that is not loaded and its answer?
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from moesaic.core.errors import EngineDeadError, MoesaicError, OverloadedError
from moesaic.policy.fleet.model_pool import (
    Action,
    Admit,
    Load,
    Measure,
    ModelPool,
    ModelState,
    Refuse,
    Unload,
)
from moesaic.server.errors import NotServingError, UnknownModelError
from moesaic.server.front.model_process import ModelProcess

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FleetModel:
    """A model, and how its process is started."""

    names: tuple[str, ...]
    """The name of the model in answers, and further ones that requests may use."""
    root: str
    """Where it is: a path, a file, or a name on a hub."""
    max_waiting: int
    """Requests that may wait for its load."""
    launch: Callable[[], Awaitable[ModelProcess]]
    measure: Callable[[], Awaitable[int]]
    """Finds out how many bytes it needs. Raises MoesaicError for a model that cannot be loaded."""
    count_bytes: Callable[[dict[str, Any], int], int]
    """How many bytes a loaded model takes, by what its process says and what was measured."""


@dataclass
class ModelRecord:
    """What has happened to one model."""

    model: FleetModel
    process: ModelProcess | None = None
    failure: str = ""
    """Why its last load failed, or its process ended. Empty if neither did."""
    exit_code: int | None = None
    """The return code of the process that failed."""
    info: dict[str, Any] = field(default_factory=dict)
    """What its process said of it when it was loaded last."""
    loads: int = 0
    unloads: int = 0
    failures: int = 0
    load_seconds: float = 0.0
    """Seconds of all loads together."""
    last_load_seconds: float = 0.0


class ModelFleet:
    """Runs in one event loop, from `start` to `drain`.

    load_wait: seconds that a request may wait for its model; None: any time. preloads: names of the models
    that are loaded at the start, as far as there is room.
    """

    def __init__(
        self,
        models: Sequence[FleetModel],
        pool: ModelPool,
        *,
        load_wait: float | None = None,
        preloads: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.records = {model.names[0]: ModelRecord(model) for model in models}
        self.draining = False
        self.worker_ended = asyncio.Event()
        """Never set: a server of several models goes on when a process ends."""
        self._canonical_names = {name: model.names[0] for model in models for name in model.names}
        self.pool = pool
        self._load_wait = load_wait
        self._preloads = list(preloads)
        self._clock = clock
        self._tickets = itertools.count(1)
        self._open_tickets: set[int] = set()
        self._futures: dict[int, asyncio.Future[ModelProcess]] = {}
        """Ticket -> what tells a waiting request that its model is loaded."""
        self._no_requests = asyncio.Event()
        self._no_requests.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.cut_event = asyncio.Event()
        """Set when running requests have to end with `cut_error`, since the server does."""
        self.cut_error = NotServingError("the server shuts down", "shutting_down")

    def start(self) -> None:
        self._carry_out(self.pool.preload(self._preloads, self._clock()))

    def raise_end(self) -> NoReturn:
        raise EngineDeadError("no model can be served")

    @property
    def names(self) -> list[str]:
        """Every name that a request may use."""
        return list(self._canonical_names)

    def find(self, name: object) -> ModelRecord:
        """The model that a request names. Raises UnknownModelError.

        A server of one model also takes requests that name none.
        """
        if name is None and len(self.records) == 1:
            return next(iter(self.records.values()))
        canonical_name = self._canonical_names.get(name) if isinstance(name, str) else None
        if canonical_name is None:
            served_names = ", ".join(map(repr, self._canonical_names))
            value = "nothing" if name is None else repr(name)
            raise UnknownModelError(f"model: got {value}; this server serves {served_names}")
        return self.records[canonical_name]

    def state_of(self, record: ModelRecord) -> ModelState:
        return self.pool.models[record.model.names[0]].state

    def require_serving(self) -> None:
        """Raise NotServingError if a request that came now would not be answered."""
        self._require_open()
        if all(record.failure and record.process is None for record in self.records.values()):
            reasons = "; ".join(f"{name}: {record.failure}" for name, record in self.records.items())
            raise NotServingError(f"no model can be loaded: {reasons}", "model_load_failed")

    def load(self, record: ModelRecord) -> None:
        """Load a model when its turn comes."""
        self._require_open()
        self._carry_out(self.pool.want(record.model.names[0], self._clock()))

    def unload(self, record: ModelRecord) -> None:
        """Unload a model once its running requests have ended."""
        self._require_open()
        self._carry_out(self.pool.unload(record.model.names[0], self._clock()))

    def require_loaded(self, record: ModelRecord) -> ModelProcess:
        """The process of a model that is loaded now. Raises NotServingError."""
        self._require_open()
        if record.process is None or self.state_of(record) not in (ModelState.LOADED, ModelState.DRAINING):
            name = record.model.names[0]
            raise NotServingError(
                f"model {name!r} is not loaded", "model_not_loaded", self._retry_after(record)
            )
        return record.process

    @contextlib.asynccontextmanager
    async def use(self, record: ModelRecord) -> AsyncIterator[ModelProcess]:
        """A loaded model's process, which is not unloaded within the block. Waits for the load.

        Raises NotServingError if the model could not be loaded, or not in time, and OverloadedError if too
        many requests wait for it.
        """
        self._require_open()
        name = record.model.names[0]
        if self.pool.count_waiting(name) >= record.model.max_waiting:
            text = f"{record.model.max_waiting} requests wait until model {name!r} is loaded, the maximum"
            raise OverloadedError(f"{text} (--max-num-seqs + --max-queue)", self._retry_after(record))
        ticket = next(self._tickets)
        future = self._futures[ticket] = asyncio.get_running_loop().create_future()
        self._open_tickets.add(ticket)
        self._no_requests.clear()
        try:
            self._carry_out(self.pool.arrive(ticket, name, self._clock()))
            yield await self._wait(future, record)
        finally:
            future.cancel()
            del self._futures[ticket]
            self._open_tickets.remove(ticket)
            self._carry_out(self.pool.leave(ticket, self._clock()))
            if not self._open_tickets:
                self._no_requests.set()

    async def drain(self, seconds: float | None = None) -> None:
        """Refuse new requests, wait for those that run or wait, and end the processes.

        After `seconds` the requests end with an error.
        """
        self.draining = True
        try:
            await self._wait_for_requests(seconds)
            await asyncio.gather(*(process.stop() for process in self._list_processes()))
        finally:
            # A second signal cancels this. Nothing may stay behind then.
            for process in self._list_processes():
                process.kill()

    async def _wait_for_requests(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._no_requests.wait()
        except TimeoutError:
            limit = f"after {seconds:g} s (--shutdown-timeout)"
            text = f"the server shuts down, and the answer had not ended {limit}"
            self.cut_error = NotServingError(text, "shutting_down")
            self.cut_event.set()

    async def _wait(self, future: asyncio.Future[ModelProcess], record: ModelRecord) -> ModelProcess:
        if future.done() or self._load_wait is None:
            return await future
        try:
            async with asyncio.timeout(self._load_wait):
                return await asyncio.shield(future)
        except TimeoutError:
            name = record.model.names[0]
            wait_text = f"after {self._load_wait:g} s (--load-wait)" if self._load_wait else "now"
            raise NotServingError(
                f"model {name!r} is not loaded {wait_text}", "model_not_loaded", self._retry_after(record)
            ) from None

    def _require_open(self) -> None:
        if self.draining:
            raise NotServingError("the server is shutting down and takes no new requests", "shutting_down")

    def _retry_after(self, record: ModelRecord) -> float:
        return max(1.0, record.last_load_seconds)

    def _list_processes(self) -> list[ModelProcess]:
        return [record.process for record in self.records.values() if record.process is not None]

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Measure(name):
                    self._begin(self._measure(self.records[name]))
                case Load(name):
                    self._begin(self._run(self.records[name]))
                case Unload(name):
                    self._begin(self._unload(self.records[name]))
                case Admit(ticket, name):
                    self._admit(ticket, self.records[name])
                case Refuse(ticket, name):
                    self._refuse(ticket, self.records[name])
        self._set_timer()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # Without the context of the request that caused it, whose id log lines would have.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _admit(self, ticket: int, record: ModelRecord) -> None:
        future = self._futures[ticket]
        if not future.done() and record.process is not None:
            future.set_result(record.process)

    def _refuse(self, ticket: int, record: ModelRecord) -> None:
        future = self._futures[ticket]
        if not future.done():
            text = f"model {record.model.names[0]!r}: {record.failure}"
            future.set_exception(NotServingError(text, "model_load_failed"))

    async def _measure(self, record: ModelRecord) -> None:
        name = record.model.names[0]
        try:
            need = await record.model.measure()
        except Exception as error:
            self._fail(record, str(error) or type(error).__name__, None)
            if not isinstance(error, (MoesaicError, OSError)):
                raise
            return
        self._carry_out(self.pool.record_need(name, need, self._clock()))

    async def _run(self, record: ModelRecord) -> None:
        """The life of a model's process."""
        name, start_time = record.model.names[0], self._clock()
        LOG.info("model %r: loading", name)
        try:
            process = await record.model.launch()
        except OSError as error:
            self._fail(record, f"its process cannot be started: {error}", None)
            return
        record.process = process
        if self.state_of(record) is ModelState.UNLOADING:  # told to unload before there was a process
            await process.stop()
        if await process.wait_ready():
            self._note_loaded(record, process, self._clock() - start_time)
            await process.end_event.wait()
        record.process = None
        if self.state_of(record) is ModelState.UNLOADING or self.draining:
            record.unloads += 1
            LOG.info("model %r: unloaded", name)
            self._carry_out(self.pool.record_end(name, self._clock()))
        else:
            self._fail(record, process.describe_end(), process.exit_code)

    def _note_loaded(self, record: ModelRecord, process: ModelProcess, seconds: float) -> None:
        name = record.model.names[0]
        record.info = process.info
        record.failure, record.exit_code = "", None
        record.loads += 1
        record.last_load_seconds = seconds
        record.load_seconds += seconds
        LOG.info("model %r: loaded in %.1f s", name, seconds)
        need = record.model.count_bytes(process.info, self.pool.models[name].need or 0)
        self._carry_out(self.pool.record_loaded(name, need, self._clock()))

    def _fail(self, record: ModelRecord, reason: str, exit_code: int | None) -> None:
        name = record.model.names[0]
        was_loaded = self.state_of(record) in (ModelState.LOADED, ModelState.DRAINING)
        verb = "its process ended" if was_loaded else "it cannot be loaded"
        record.failure, record.exit_code = f"{verb}: {reason}", exit_code
        record.failures += 1
        LOG.error("model %r: %s", name, record.failure)
        self._carry_out(self.pool.record_end(name, self._clock()))

    async def _unload(self, record: ModelRecord) -> None:
        if record.process is not None:  # `_run` sees its end
            await record.process.stop()

    def _set_timer(self) -> None:
        """Look for models that are idle for too long, at the time when the first one is."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        next_time = self.pool.next_time
        if next_time is not None and not self.draining:
            seconds = max(0.0, next_time - self._clock())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._carry_out(self.pool.tick(self._clock()))
