"""Passes requests on to the process of the model that they name, and its answers back byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import parse_qs

import httpx
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.core.errors import MoesaicError, RequestError
from moesaic.server import events
from moesaic.server.errors import NotServingError, Problem, make_problem
from moesaic.server.events import run_until_disconnect
from moesaic.server.front.fleet import ModelFleet, ModelRecord
from moesaic.server.front.model_process import ModelProcess
from moesaic.server.json_body import parse
from moesaic.trace.logs import REQUEST

OWN_HEADERS = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("expect", "host", "content-length"),
        *("authorization", "x-api-key", "x-request-id", "origin"),
    )
)
"""Headers of a request that are about its connection to this server, or that this server has checked."""
OWN_ANSWER_HEADERS = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server", "x-request-id")
)
"""Headers of an answer that this server makes itself."""
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
NO_TLS = httpx.create_ssl_context(verify=False, trust_env=False)
"""The context of transports of plain HTTP. Otherwise each would make one of its own."""
PAGE_SECONDS = 5.0
"""Seconds that a process has to answer with its metrics."""
ANTHROPIC_PATH, RESPONSES_PATH = "/v1/messages", "/v1/responses"


class Forwarding:
    """ASGI middleware that answers requests for `routes` by the process of their model.

    A request names it in the field `model` of its body, or in the query (`?model=NAME`). GET never loads a
    model: it asks how one is, and a stream of its state must not keep it in memory.
    """

    def __init__(self, app: ASGIApp, fleet: ModelFleet, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._fleet = fleet
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not any(
            route.matches(scope)[0] is Match.FULL for route in self._routes
        ):
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope["path"], send)
        try:
            body = await Request(scope, receive).body()
            content = _read_json(body)
            query = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])
            record = self._fleet.find(content.get("model", query[0]))
            work = self._answer(_make_request(scope, body), record, answer, content.get("stream") is True)
            await run_until_disconnect(receive, work)
        except (MoesaicError, Problem) as error:
            await answer.fail(make_problem(error))
        # Any other error is logged by uvicorn, which closes the connection or answers 500.

    async def _answer(
        self, request: httpx.Request, record: ModelRecord, answer: _Answer, is_stream: bool
    ) -> None:
        """Answer a request. It ends with an error when the server cannot wait any longer."""
        forwarding = asyncio.ensure_future(self._forward(request, record, answer, is_stream))
        cut = asyncio.ensure_future(self._fleet.cut_event.wait())
        try:
            await asyncio.wait((forwarding, cut), return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                return forwarding.result()
        finally:
            forwarding.cancel()
            cut.cancel()
            await asyncio.gather(forwarding, cut, return_exceptions=True)
        raise self._fleet.cut_error

    async def _forward(
        self, request: httpx.Request, record: ModelRecord, answer: _Answer, is_stream: bool
    ) -> None:
        if request.method == "GET":
            return await self._exchange(request, self._fleet.require_loaded(record), record, answer)
        async with contextlib.AsyncExitStack() as stack:
            if is_stream:
                await stack.enter_async_context(answer.send_pings())
            process = await stack.enter_async_context(self._fleet.use(record))
            return await self._exchange(request, process, record, answer)

    async def _exchange(
        self, request: httpx.Request, process: ModelProcess, record: ModelRecord, answer: _Answer
    ) -> None:
        """Send the request to the process, and its answer to the client."""
        try:
            async with _connect(process) as transport:
                request.headers["Authorization"] = f"Bearer {process.key}"
                response = await transport.handle_async_request(request)
                try:
                    await answer.copy(response)
                finally:
                    await response.aclose()
        except httpx.HTTPError as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # its end is known a moment after that of its connection
                    await process.end_event.wait()
            reason = (
                process.describe_end() if process.end_event.is_set() else str(error) or type(error).__name__
            )
            text = f"model {record.model.names[0]!r}: its process ended: {reason}"
            raise NotServingError(text, "model_ended", retry_after=1.0) from error


class _Answer:
    """The answer to one request, which may begin as a stream of pings before the model is loaded."""

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._has_begun = False
        self._is_event_stream = False
        self._pings: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def send_pings(self) -> AsyncIterator[None]:
        """Within the block a ping is sent whenever nothing else has come for PING_SECONDS."""
        self._pings = asyncio.create_task(self._ping())
        try:
            yield
        finally:
            await self._end_pings()

    async def copy(self, response: httpx.Response) -> None:
        """Send an answer of the model's process."""
        await self._end_pings()  # from here on the process sends its own
        stream: Any = response.stream
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            if not self._has_begun:
                await self._begin(response.status_code, _list_headers(response))
            async for chunk in stream:
                await self._send_body(chunk, True)
            await self._send_body(b"", False)
            return
        body = b"".join([chunk async for chunk in stream])
        if self._has_begun:
            await self._send_last_event(body.decode(errors="replace"))
            return
        length = (b"content-length", str(len(body)).encode())
        await self._begin(response.status_code, [*_list_headers(response), length], is_event_stream=False)
        await self._send_body(body, False)

    async def fail(self, problem: Problem) -> None:
        """Answer with an error, or end the stream that has begun with one."""
        await self._end_pings()
        if self._is_event_stream:
            await self._send_last_event(problem.json(self._path))
        elif not self._has_begun:
            response = problem.response(self._path)
            await self._begin(response.status_code, response.raw_headers, is_event_stream=False)
            await self._send_body(response.body, False)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(events.PING_SECONDS)
            if not self._has_begun:
                await self._begin(200, STREAM_HEADERS)
            await self._send_body(self._ping_text, True)

    @property
    def _ping_text(self) -> bytes:
        if self._path.startswith(ANTHROPIC_PATH):
            return b'event: ping\ndata: {"type":"ping"}\n\n'
        return b": ping\n\n"

    async def _end_pings(self) -> None:
        pings, self._pings = self._pings, None
        if pings is not None:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)

    async def _begin(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], is_event_stream: bool = True
    ) -> None:
        self._has_begun, self._is_event_stream = True, is_event_stream
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _send_body(self, body: bytes | memoryview, more_body: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more_body}
        await self._send(message)

    async def _send_last_event(self, error_json: str) -> None:
        """End a stream with an error, in the form of its API."""
        if self._path.startswith(ANTHROPIC_PATH):
            event = f"event: error\ndata: {error_json}\n\n"
        elif self._path.startswith(RESPONSES_PATH):
            detail = json.loads(error_json).get("error", {})
            fields = {"type": "error", "code": detail.get("code"), "message": detail.get("message")}
            event = f"event: error\ndata: {json.dumps(fields | {'param': detail.get('param')})}\n\n"
        else:
            event = f"data: {error_json}\n\ndata: [DONE]\n\n"
        await self._send_body(event.encode(), False)


@contextlib.asynccontextmanager
async def _connect(process: ModelProcess) -> AsyncIterator[httpx.AsyncHTTPTransport]:
    """A connection to a process, for one request.

    An idle connection could be closed by the process while a request is written to it. A new one to a Unix
    socket costs less than a tenth of a millisecond.
    """
    async with httpx.AsyncHTTPTransport(uds=str(process.socket), verify=NO_TLS) as transport:
        yield transport


def _make_request(scope: Scope, body: bytes) -> httpx.Request:
    """The request as the model's process gets it."""
    target = scope.get("raw_path") or scope["path"].encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    url = httpx.URL(scheme="http", host="model", raw_path=target)
    headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in OWN_HEADERS]
    headers.append((b"x-request-id", REQUEST.get().encode("latin-1")))
    # Without a limit of time: an answer may take as long as it needs.
    timeout = {"connect": None, "read": None, "write": None, "pool": None}
    return httpx.Request(scope["method"], url, headers=headers, content=body, extensions={"timeout": timeout})


def _list_headers(response: httpx.Response) -> list[tuple[bytes, bytes]]:
    return [
        (name, value)
        for name, value in response.headers.raw
        if name.lower().decode("latin-1") not in OWN_ANSWER_HEADERS
    ]


def _read_json(body: bytes) -> dict[str, Any]:
    """The fields of a body. Empty for one that is no object: its model's process refuses it.

    Raises RequestError for what is not JSON.
    """
    if not body.strip():
        return {}
    try:
        content = parse(body)
    except json.JSONDecodeError as error:
        text = f"the body is not valid JSON: {error.msg} at character {error.pos}"
        raise RequestError(text) from error
    return content if isinstance(content, dict) else {}


async def read_page(process: ModelProcess, path: str) -> str | None:
    """What a process answers to GET `path`. None if it does not answer."""
    request = httpx.Request("GET", f"http://model{path}", extensions={"timeout": {"read": PAGE_SECONDS}})
    try:
        async with _connect(process) as transport:
            response = await transport.handle_async_request(request)
            return (await response.aread()).decode()
    except httpx.HTTPError:
        return None
