"""An asynchronous client of any OpenAI-compatible server. cli, bench and batch send all requests with it.

It reads no environment variables: no proxies, no keys. It can call a server in this process without a
socket.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from moesaic.core.errors import ConnectionLost, MoesaicError

_IN_PROCESS = "http://moesaic.invalid"
"""The address of a server in this process. Nothing connects to it."""

_MAX_ERROR_CHARACTERS = 300
"""Maximum number of characters of an answer that an error message repeats."""
_LEAVING_SECONDS = 5.0
"""Seconds in which an application in this process may end a call whose client has left."""


class ApiError(MoesaicError):
    """The server refused a request. `retry_after`: seconds to wait, None if the server does not say."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, as the server reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens whose KV was already there. None: the server does not say."""


@dataclass(frozen=True)
class Chunk:
    """An event of a stream."""

    arrival_time: float
    """Time of arrival, in seconds on the client's clock."""
    text: str
    """New text of the answer; may be empty."""
    finish_reason: str | None = None
    usage: Usage | None = None
    """Token counts so far; None if the event has none."""
    reasoning: str = ""
    """The part of `text` that is reasoning. The rest follows it."""

    @property
    def content(self) -> str:
        """The part of `text` that is not reasoning."""
        return self.text.removeprefix(self.reasoning)


@dataclass(frozen=True)
class Reply:
    """A complete answer with any status."""

    status: int
    body: Any
    """The parsed JSON, or the text if it is not JSON."""
    request_id: str | None
    """The header X-Request-Id."""
    retry_after: float | None
    """Seconds that the server asks to wait; None if it does not."""

    def require_success(self) -> Any:
        """The body. Raises ApiError unless the status is 2xx."""
        if not 200 <= self.status < 300:
            raise ApiError(self.status, _message(self.body), self.retry_after)
        return self.body


class Client:
    """Use it as `async with Client(url) as client`.

    base_url: http://host:port; a trailing /v1 is dropped. app: an ASGI application that is called in place
    of an address. clock: returns seconds, for the arrival times of chunks. timeout: maximum seconds between
    two pieces of an answer; None means no limit. Every method raises ConnectionLost if the server cannot be
    reached or the connection breaks.
    """

    def __init__(
        self,
        base_url: str = _IN_PROCESS,
        *,
        app: Callable[..., Any] | None = None,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        timeout: float | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.clock = clock
        # A load generator decides itself how many requests are open. httpx would allow 100.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout, connect=30.0),
            transport=_transport(app, limits),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def get(self, path: str) -> Reply:
        """GET `path`, such as /health."""
        return await self._request("GET", path)

    async def post(self, path: str, body: object) -> Reply:
        """POST `body` as JSON and wait for the complete answer."""
        return await self._request("POST", path, body)

    async def delete(self, path: str) -> Reply:
        """DELETE `path` and wait for the complete answer."""
        return await self._request("DELETE", path)

    async def models(self) -> list[dict[str, Any]]:
        """The served models. moesaic and vLLM add max_model_len to each."""
        body = (await self.get("/v1/models")).require_success()
        data = body.get("data") if isinstance(body, dict) else None
        if not isinstance(data, list):
            raise ApiError(200, f"{self.base_url}/v1/models: not a list of models")
        return data

    async def stream(self, path: str, body: object) -> AsyncGenerator[Chunk, None]:
        """POST `body`, whose "stream" must be true, and yield the events as they arrive.

        Raises ApiError if the server reports an error, at the start or during the stream.
        """
        request = self._build("POST", path, body)
        try:
            response = await self._http.send(request, stream=True)
            async with aclosing(response):
                if not response.is_success:
                    await response.aread()
                    _reply(response).require_success()
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        yield _chunk(event, self.clock())
        except httpx.HTTPError as error:
            raise self._connection_error(error) from error

    async def _request(self, method: str, path: str, body: object = None) -> Reply:
        try:
            return _reply(await self._http.send(self._build(method, path, body)))
        except httpx.HTTPError as error:
            raise self._connection_error(error) from error

    def _build(self, method: str, path: str, body: object = None) -> httpx.Request:
        # json.dumps escapes non-ASCII: a lone surrogate must reach the server, which explains its refusal.
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            return self._http.build_request(method, self.base_url + path, content=content, headers=headers)
        except httpx.InvalidURL as error:
            raise self._connection_error(error) from error

    def _connection_error(self, error: Exception) -> ConnectionLost:
        return ConnectionLost(f"{self.base_url}: {str(error) or type(error).__name__}")


def _transport(app: Callable[..., Any] | None, limits: httpx.Limits) -> httpx.AsyncBaseTransport:
    if app is None:
        return httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
    return _AppTransport(app)


class _AppTransport(httpx.AsyncBaseTransport):
    """Calls an ASGI application in this process. Its answer arrives piece by piece, as over a socket.

    httpx's own transport passes an answer on only when it is complete.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],  # that of ASGI has no query
            "query_string": request.url.query,
            "root_path": "",
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
        }
        call = _AppCall(self._app, scope, await request.aread())
        try:
            status, headers = await call.head()
        except BaseException:
            await call.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=call)


class _AppCall(httpx.AsyncByteStream):
    """The body of the answer to a call of an ASGI application. A client that leaves closes it early."""

    def __init__(self, app: Callable[..., Any], scope: dict[str, Any], body: bytes) -> None:
        self._request: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        self._answer: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """What the application sends. None: it has ended."""
        self._left = asyncio.Event()
        self._task = asyncio.create_task(self._run(app, scope))

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers. An application that ends without them has a bug: status 500."""
        message = await self._answer.get()
        if message is None:
            self._answer.put_nowait(None)  # there is no body, either
        return (500, []) if message is None else (message["status"], list(message.get("headers", ())))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        has_more = True
        while has_more and (message := await self._answer.get()) is not None:
            yield message.get("body", b"")
            has_more = message.get("more_body", False)

    async def aclose(self) -> None:
        self._left.set()
        await asyncio.wait([self._task], timeout=_LEAVING_SECONDS)
        self._task.cancel()

    async def _run(self, app: Callable[..., Any], scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._answer.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self._answer.put_nowait(message)


def _reply(response: httpx.Response) -> Reply:
    try:
        body: Any = response.json()
    except ValueError:
        body = response.text
    wait = response.headers.get("retry-after", "")  # a proxy may send a date, which is ignored
    return Reply(
        status=response.status_code,
        body=body,
        request_id=response.headers.get("x-request-id"),
        retry_after=float(wait) if wait.isdecimal() else None,
    )


async def _events(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The data of server-sent events up to [DONE]. Splits only at newlines: JSON may contain U+2028."""
    buffer = b""
    async for piece in response.aiter_bytes():
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data.decode(errors="replace")


def _chunk(data: str, now: float) -> Chunk:
    """Parse one event of either endpoint. Raises ApiError if it reports an error."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ApiError(200, f"an event is not JSON: {data[:_MAX_ERROR_CHARACTERS]}") from error
    if not isinstance(event, dict) or event.get("error") is not None:
        raise ApiError(200, _message(event))
    choice = (event.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    parts = (choice.get("text"), reasoning, delta.get("content"))
    text = "".join(part for part in parts if part)
    return Chunk(now, text, choice.get("finish_reason"), _usage(event), reasoning)


def _usage(event: dict[str, Any]) -> Usage | None:
    counts = event.get("usage")
    if not counts:
        return None
    cached_tokens = (counts.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Usage(
        int(counts.get("prompt_tokens") or 0),
        int(counts.get("completion_tokens") or 0),
        None if cached_tokens is None else int(cached_tokens),
    )


def _message(body: Any) -> str:
    """The message in an error's body, which may have OpenAI's format or another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else json.dumps(body)
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]
