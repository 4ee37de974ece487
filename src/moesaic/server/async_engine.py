"""The engine on an event loop: one thread receives messages, and the loop does everything else.

worker --messages--> reader thread --call_soon_threadsafe--> Engine.receive --> streams' queues
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

from moesaic.core import messages
from moesaic.core.errors import (
    ConfigError,
    ConnectionLost,
    EngineDeadError,
    MoesaicError,
    NonFiniteLogitsError,
    RequestError,
)
from moesaic.core.request import FinishReason, RequestOutput, SamplingParams
from moesaic.core.worker_info import WorkerInfo
from moesaic.engine import Engine
from moesaic.server.errors import NotServingError
from moesaic.server.meter import Meter
from moesaic.server.request_trace import TRACE
from moesaic.trace.logs import REQUEST, of_request

LOG = logging.getLogger(__name__)
OUTAGE_RETRY_SECONDS = 10.0
"""Seconds after which a client should try again that was refused in an outage."""


class Inbox(Protocol):
    """The receiving half of a connection. Engine uses the sending half."""

    def receive(self, timeout: float | None = None) -> messages.Message | None:
        """The next message. Raises ConnectionLost if the worker is gone."""
        ...


class Stream:
    """The outputs of one call, in order of arrival: an async iterator of (prompt number, output).

    It ends after the last completion. It raises EngineDeadError if the worker dies first, NotServingError if
    an outage or the end of the server ends it, and NonFiniteLogitsError or RequestError at the first
    completion that ends because there is no token for it.
    Closing it early cancels the unfinished completions.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._items: asyncio.Queue[tuple[int, RequestOutput] | MoesaicError] = asyncio.Queue()
        self._num_unfinished = 0
        self.groups: list[int] = []
        """Request ids, one for each prompt."""
        self.has_begun = False
        """Whether it has had an output."""

    def expect(self, group: int, completions: int) -> None:
        self.groups.append(group)
        self._num_unfinished += completions

    def put(self, item: tuple[int, RequestOutput] | MoesaicError) -> None:
        self.has_begun = True
        self._items.put_nowait(item)

    def close(self) -> None:
        """Cancel the unfinished completions. Closing again, or after the end, does nothing."""
        self._num_unfinished = 0
        self._engine.cancel(self.groups)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._num_unfinished:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, MoesaicError):
            raise item
        self._num_unfinished -= item[1].finished
        if item[1].finish_reason is FinishReason.ERROR:
            raise NonFiniteLogitsError
        if item[1].finish_reason is FinishReason.NO_ALLOWED_TOKEN:
            raise RequestError(
                "structured_outputs: the answer ended early: no token is allowed by both the grammar, or the "
                "end of the reasoning at its budget, and the other parameters (such as min_tokens), or the "
                "grammar is too complex at this place",
                "structured_outputs",
            )
        return item


@dataclass
class _Route:
    """The stream that receives the outputs of one request."""

    stream: Stream
    number: int
    """Number of the prompt in its call, from 0."""
    left: int
    """Number of unfinished completions."""
    name: str
    """Name in log lines."""


class AsyncEngine:
    """`engine` and the `connection` to its worker, run by the event loop that calls `start`.

    clock: returns seconds, for the latency histograms. describe_end: returns one line on how the worker
    ended; it is called once the connection is lost.
    """

    def __init__(
        self,
        engine: Engine,
        connection: Inbox,
        *,
        clock: Callable[[], float] = time.monotonic,
        describe_end: Callable[[], str] | None = None,
    ) -> None:
        self.engine = engine
        self.meter = Meter()
        self.draining = False
        self.failure: messages.WorkerFailed | None = None
        """The error that the worker reported before it ended, if it reported one."""
        self.ready = asyncio.Event()
        """Set once the model is loaded."""
        self.worker_ended = asyncio.Event()
        """Set once the worker is gone."""
        self._outage = messages.Outage("")
        """Why nobody computes requests for long. The empty reason: somebody does, or will soon."""
        self._connection = connection
        self._clock = clock
        self._describe_end = describe_end
        self._routes: dict[int, _Route] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Start to receive messages for the running event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="worker-reader", daemon=True).start()

    def raise_end(self) -> NoReturn:
        """Raise why the worker is gone: ConfigError if a setting or the checkpoint was the cause."""
        if self.failure is not None and self.failure.user_error:
            raise ConfigError(self.failure.error)
        raise EngineDeadError(f"the worker is gone: {self.engine.dead}")

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises EngineDeadError if the worker dies first."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.ready, self.worker_ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.worker_ended.is_set():
            raise EngineDeadError(f"the worker is gone: {self.engine.dead}")

    def require_serving(self) -> WorkerInfo:
        """The loaded model. Raises NotServingError or EngineDeadError if requests cannot be served now."""
        info = self.require_loaded()
        if self._outage.reason:
            raise self._make_outage_error()
        return info

    def require_loaded(self) -> WorkerInfo:
        """The loaded model, also in an outage. Raises NotServingError or EngineDeadError if there is none, or
        if the server shuts down."""
        if self.engine.dead is not None:
            raise EngineDeadError(f"the worker is gone: {self.engine.dead}")
        if self.draining:
            raise NotServingError("the server is shutting down and takes no new requests", "shutting_down")
        if self.engine.info is None:
            raise NotServingError("the model is still loading", "loading", retry_after=1.0)
        return self.engine.info

    def open(
        self,
        jobs: Sequence[tuple[list[int], SamplingParams]],
        *,
        own_text: bool = False,
        kept_special_tokens: Collection[str] = (),
    ) -> Stream:
        """Submit every (prompt, parameters) pair, or none if one is refused.

        own_text, kept_special_tokens: see Engine.submit.
        """
        self.require_serving()
        self.require_room_ever(len(jobs), sum(params.n for _, params in jobs))
        stream = Stream(self)
        try:
            for number, (prompt, params) in enumerate(jobs):
                self._submit(stream, number, prompt, params, own_text, kept_special_tokens)
        except MoesaicError:
            stream.close()
            raise
        return stream

    def require_room_ever(self, prompts: int, completions: int) -> None:
        """Raise RequestError for a call of several prompts that is too large even for an empty queue.

        Status 429 would tell the client to try again, which could never succeed.
        """
        limit = self.engine.limit
        if limit is not None and prompts > 1 and completions > limit:
            request_text = f"got {prompts} prompts, {completions} completions in all"
            raise RequestError(f"prompt: {request_text}; allowed in one call: at most {limit}", "prompt")

    async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one prompt. Closing the iterator early cancels the request."""
        with closing(self.open([(prompt, params)])) as stream:
            async for _, output in stream:
                yield output

    def cancel(self, groups: Sequence[int]) -> None:
        """Cancel these requests and free their resources. Skips requests that have ended."""
        for group in groups:
            route = self._routes.pop(group, None)
            if route is None:
                continue
            self.meter.record_abort(group)
            LOG.debug("request %d: cancelled", group, extra=of_request(route.name))
            try:
                self.engine.cancel(group)
            except EngineDeadError as error:
                self._die(str(error))
        self._note_idle()

    async def drain(self, seconds: float | None = None) -> None:
        """Refuse new requests, and wait until all others have ended. After `seconds` they end with an
        error."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            reason = f"the server shuts down, and the answer had not ended after {seconds:g} s"
            self._end_streams(NotServingError(f"{reason} (--shutdown-timeout)", "shutting_down"))

    def _submit(
        self,
        stream: Stream,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        own_text: bool,
        kept_special_tokens: Collection[str],
    ) -> None:
        try:
            name = REQUEST.get()
            group = self.engine.submit(
                prompt, params, own_text=own_text, kept_special_tokens=kept_special_tokens, name=name
            )
        except EngineDeadError as error:
            self._die(str(error))
            raise
        stream.expect(group, params.n)
        self._routes[group] = _Route(stream, number, params.n, name)
        self._idle.clear()
        times = self.meter.record_arrival(group, params.n, self._clock())
        trace = TRACE.get()
        if trace is not None:
            trace.record_submission(len(prompt), params, times)
        LOG.debug("request %d: %d prompt tokens, n %d", group, len(prompt), params.n)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the reader thread: pass each message to the loop until the worker or the loop is gone."""
        while not loop.is_closed():
            try:
                message = self._connection.receive(None)
            except ConnectionLost as error:
                _call(loop, self._die, self._describe_end() if self._describe_end else str(error))
                return
            except Exception as error:  # without this thread no request would ever end
                _call(loop, self._die, f"the thread that reads its messages failed: {error!r}")
                raise
            if message is not None and not _call(loop, self._receive, message):
                return

    def _receive(self, message: messages.ToEngine) -> None:
        """Handle one message, in the loop. An error here ends every stream, so that none of them hangs."""
        if isinstance(message, messages.WorkerFailed):
            self.failure = message
        elif isinstance(message, messages.Outage):
            self._outage = message
            if message.reason:
                self._end_streams(self._make_outage_error(), not message.ends_begun_answers)
            return
        try:
            outputs = self.engine.receive(message)
        except EngineDeadError as error:
            self._die(str(error))
            return
        except Exception as error:
            self._die(f"the engine failed on a message: {error!r}")
            raise
        if self.engine.dead is not None:
            self._die(self.engine.dead)
        elif self.engine.info is not None:
            self.ready.set()
        now = self._clock()
        self.meter.record_message(message, outputs, now)
        for output in outputs:
            self._deliver(output)
        self._note_idle()

    def _deliver(self, output: RequestOutput) -> None:
        route = self._routes.get(output.request_id)
        if route is None:
            return
        route.stream.put((route.number, output))
        route.left -= output.finished
        if output.finish_reason is not None:
            reason, extra = output.finish_reason.value, of_request(route.name)
            LOG.debug("request %d: completion %d: %s", output.request_id, output.index, reason, extra=extra)
        if not route.left:
            del self._routes[output.request_id]

    def _die(self, reason: str) -> None:
        """End every stream with an error. The first reason is kept."""
        if not self.worker_ended.is_set():
            self.engine.mark_dead(reason)
            self.worker_ended.set()
        streams = {id(route.stream): route.stream for route in self._routes.values()}
        for group in self._routes:
            self.meter.record_abort(group)
        self._routes.clear()
        # A stream gets one error, however many of its prompts were unfinished.
        for stream in streams.values():
            stream.put(EngineDeadError(f"the worker is gone: {self.engine.dead}"))
        self._note_idle()

    def _end_streams(self, error: MoesaicError, spares_begun: bool = False) -> None:
        """End every stream with an error, and cancel its requests. spares_begun: leave out streams that have
        had an output."""
        streams = {id(route.stream): route.stream for route in self._routes.values()}
        for stream in streams.values():
            if not (spares_begun and stream.has_begun):
                self.cancel(stream.groups)
                stream.put(error)

    def _make_outage_error(self) -> NotServingError:
        reason = f"requests are not computed now: {self._outage.reason}"
        return NotServingError(reason, "unavailable", retry_after=OUTAGE_RETRY_SECONDS)

    def _note_idle(self) -> None:
        if not self._routes:
            self._idle.set()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: object) -> bool:
    """Schedule `function` in `loop` from another thread. Returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        return False
    return True
