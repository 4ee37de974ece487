"""Sends answers, also as server-sent events. Cancels the work if the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.core.errors import MoesaicError
from moesaic.server.async_engine import Stream
from moesaic.server.errors import problem_of
from moesaic.server.responses import Payload

T = TypeVar("T")

CLIENT_GONE = 499
"""The status of an answer whose client has disconnected. It appears in logs only."""


class EventStream(Response):
    """Sends `chunks` as server-sent events. An error during the stream is sent as an event too.

    Closes `source` in every case, so a client that disconnects cancels its request.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[Payload], source: Stream) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        finally:
            self._source.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(_events(self._chunks)) as events:
            async for event in events:
                data = f"data: {event}\n\n".encode()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer(receive: Receive, source: Stream, work: Coroutine[Any, Any, Payload]) -> Response:
    """The result of `work`, which reads `source`. Closes `source` at the end or if the client disconnects."""
    try:
        payload = await unless_disconnected(receive, work)
    finally:
        source.close()
    return Response(status_code=CLIENT_GONE) if payload is None else payload.response()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`. If the client disconnects first, cancels `work` and returns None."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _events(chunks: AsyncIterator[Payload]) -> AsyncGenerator[str, None]:
    try:
        async for chunk in chunks:
            yield chunk.json_text()
    except MoesaicError as error:
        yield problem_of(error).json()
    except Exception as error:
        yield problem_of(error).json()
        raise
    yield "[DONE]"
