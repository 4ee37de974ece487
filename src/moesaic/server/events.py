"""Sends answers, also as server-sent events. Cancels the work if the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.core.errors import MoesaicError
from moesaic.server.async_engine import Stream
from moesaic.server.errors import Problem, make_problem
from moesaic.server.responses import Payload

T = TypeVar("T")

PING_SECONDS = 10.0
"""Maximum number of seconds that a stream is silent, as while a long prompt is read. Clients and proxies may
take a longer silence for an outage."""
CLIENT_GONE = 499
"""The status of an answer whose client has disconnected. It appears in logs only."""


class Sendable(Protocol):
    """What a stream sends."""

    def json_text(self) -> str: ...


SendableT = TypeVar("SendableT", bound=Sendable)


class Source(Protocol):
    """Where the chunks of a stream come from."""

    def close(self) -> None:
        """Nobody reads any more."""
        ...


class EventStream(Response, Generic[SendableT]):
    """Sends `chunks` as server-sent events. An error during the stream is sent as an event too.

    Closes `source` in every case, so a client that disconnects cancels its request.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[SendableT], source: Source) -> None:
        # X-Accel-Buffering tells nginx to pass events on at once.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # nobody knows the length of a stream before its end
        self._chunks = chunks
        self._source = source
        self._last_event_time = 0.0
        """Time at which something was sent, on the loop's clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(send))
        finally:
            self._source.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._note_event()
        pings = asyncio.ensure_future(self._send_pings(send))
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    self._note_event()
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Send) -> None:
        """Send a ping whenever nothing was sent for PING_SECONDS."""
        while True:
            silence = asyncio.get_running_loop().time() - self._last_event_time
            if silence < PING_SECONDS:
                await asyncio.sleep(PING_SECONDS - silence)
                continue
            self._note_event()
            await send({"type": "http.response.body", "body": self._ping.encode(), "more_body": True})

    def _note_event(self) -> None:
        self._last_event_time = asyncio.get_running_loop().time()

    async def _events(self) -> AsyncGenerator[str, None]:
        try:
            async for chunk in self._chunks:
                yield self._event(chunk)
        except MoesaicError as error:
            yield self._failure(make_problem(error))
        except Exception as error:
            yield self._failure(make_problem(error))
            raise
        if self._end:
            yield self._end

    _end = "data: [DONE]\n\n"
    _ping = ": ping\n\n"
    """A comment, which clients skip."""

    def _event(self, chunk: SendableT) -> str:
        return f"data: {chunk.json_text()}\n\n"

    def _failure(self, problem: Problem) -> str:
        return f"data: {problem.json()}\n\n"


@dataclass(frozen=True)
class NamedEvent:
    """An event with a name, which its data repeats as `type`."""

    type: str
    fields: Mapping[str, Any]
    """The rest of its data."""

    def json_text(self) -> str:
        data = {"type": self.type, **self.fields}
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


class NamedEventStream(EventStream[NamedEvent]):
    """Sends events with names. The last one says how the answer ended.

    make_error_event: returns the event that says that the answer ended by an error.
    """

    def __init__(
        self,
        events: AsyncIterator[NamedEvent],
        source: Source,
        make_error_event: Callable[[Problem], NamedEvent],
        ping: NamedEvent | None = None,
    ) -> None:
        """ping: what is sent in a long silence. None: a comment."""
        super().__init__(events, source)
        if ping is not None:
            self._ping = self._event(ping)
        self._make_error_event = make_error_event

    _end = ""

    def _event(self, chunk: NamedEvent) -> str:
        return f"event: {chunk.type}\ndata: {chunk.json_text()}\n\n"

    def _failure(self, problem: Problem) -> str:
        return self._event(self._make_error_event(problem))


async def answer(receive: Receive, source: Stream, work: Coroutine[Any, Any, Payload]) -> Response:
    """The result of `work`, which reads `source`. Closes `source` at the end or if the client disconnects."""
    try:
        payload = await run_until_disconnect(receive, work)
    finally:
        source.close()
    return Response(status_code=CLIENT_GONE) if payload is None else payload.response()


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`. If the client disconnects first, cancels `work` and returns None."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        # Both must have ended before the caller closes what they use.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
