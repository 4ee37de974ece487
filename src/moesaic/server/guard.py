"""Checks the host, the key, the size and the pace of every request, and gives it an id.

That happens before any route sees the request.

Question: Who may call the API: keys, hosts, sizes and times of bodies?
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.server import web_page
from moesaic.server.errors import Problem, show_value
from moesaic.server.hosts import Hosts
from moesaic.trace.logs import REQUEST

MAX_BODY_BYTES = 32 * 2**20
MANY_BODIES = 16
"""Bodies of the maximum size that all open requests together may have. They are held in memory."""
BODY_SECONDS = 60.0
BODY_RATE = 500
"""Bytes of a body that give its client another second, as in Apache's mod_reqtimeout."""
ALIVE_PATHS = frozenset({"/health", "/ping", "/live", "/metrics"})
"""Paths that are answered when the server has too many connections for anything else."""
OPEN_PATHS = ALIVE_PATHS | {"/version", "/openapi.json", "/docs"} | web_page.PATHS
"""Paths that need no key. All others need one if there is one, also those that do not exist."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


@dataclass(frozen=True)
class Access:
    """Who may call which paths."""

    api_key: str | None = None
    """The key that clients must send. None means that no key is needed."""
    admin_key: str | None = None
    """The key of `admin_paths`, which is also good for all other paths. None closes the former."""
    admin_paths: frozenset[str] = frozenset()
    """Paths that always need the admin key."""
    hosts: Hosts | None = None
    """What the header Host may be where no API key is needed. None means that anything is allowed."""

    def problem(self, path: str, headers: Headers) -> Problem | None:
        """Why this request is refused. None if it is not."""
        if path in OPEN_PATHS:
            return None
        if self.api_key is None and self.hosts is not None and not self.hosts.allow(headers.get("host", "")):
            return Problem(
                403,
                f"Host: got {show_value(headers.get('host', ''))}; allowed: localhost, the address of "
                "--host, and what --allowed-hosts names; any host with --api-key",
                code="host_not_allowed",
            )
        if not path.isprintable():  # a route for /x also matches "/x\n", which is none of `admin_paths`
            return Problem(404, f"the path: got {show_value(path)}; allowed: printable characters")
        keys: tuple[str | None, ...]
        if path in self.admin_paths:
            keys, kind = (
                (self.admin_key,),
                "admin key, which the server prints at its start if none was given",
            )
        elif self.api_key is not None:
            keys, kind = (self.api_key, self.admin_key), "API key"
        else:
            return None
        if any(_has_key(headers, key) for key in keys):
            return None
        return Problem(
            401,
            f"wrong or missing {kind}; send it as the header Authorization: Bearer KEY, or as x-api-key",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class Guard:
    """ASGI middleware. body_seconds: seconds that a body may take, plus one for each BODY_RATE bytes. It may
    also stop for no longer than that.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._app = app
        self._access = access
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._body_bytes = 0
        """Bytes in the bodies of all open requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id", ""))
        REQUEST.set(request_id)  # log lines of this task name the request from here on
        send_with_id = _with_request_id(send, request_id)
        problem = self._access.problem(scope["path"], headers) or self._size_problem(headers)
        if problem is None:
            with contextlib.ExitStack() as request_end:
                await self._app(scope, self._limit_body(receive, request_end), send_with_id)
        else:
            await problem.response(scope["path"])(scope, receive, send_with_id)

    def _size_problem(self, headers: Headers) -> Problem | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            return Problem(  # a proxy in front may believe the other one and see another end of the request
                400,
                "a request has the header Content-Length or Transfer-Encoding, not both",
                code="invalid_http",
                headers={"Connection": "close"},
            )
        length = headers.get("content-length", "")
        # Only 20 digits are parsed: a number of a million digits would take the event loop's time.
        return self._too_large() if length.isdecimal() and int(length[:20]) > self._max_body_bytes else None

    def _too_large(self) -> Problem:
        return Problem(
            413,
            f"the body is larger than {self._max_body_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},  # the rest of the body is not read
        )

    def _limit_body(self, receive: Receive, request_end: contextlib.ExitStack) -> Receive:
        """`receive` that raises if the body is too large or too slow. request_end: ends with the request.

        It also works without a Content-Length header. After the body there are no limits: a route then waits
        for the client to leave, for as long as its answer takes.
        """
        num_bytes, start_time, is_complete = 0, 0.0, False

        async def receive_limited() -> Message:
            nonlocal num_bytes, start_time, is_complete
            if is_complete:
                return await receive()
            now = asyncio.get_running_loop().time()
            start_time = start_time or now
            deadline = min(now, start_time + num_bytes / BODY_RATE) + self._body_seconds
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            size = len(message.get("body", b""))
            num_bytes += size
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            self._hold(size)
            request_end.callback(self._hold, -size)
            if self._body_bytes > MANY_BODIES * self._max_body_bytes:
                raise self._too_many_bytes()
            return message

        return receive_limited

    def _hold(self, size: int) -> None:
        self._body_bytes += size

    def _too_many_bytes(self) -> Problem:
        return Problem(
            503,
            f"all open requests together have more than {MANY_BODIES} times {self._max_body_bytes} bytes",
            "service_unavailable",
            code="too_many_bytes",
            headers={"Connection": "close", "Retry-After": "1"},
        )

    def _too_slow(self) -> Problem:
        return Problem(
            408,
            f"the body did not arrive within {self._body_seconds:g} s, plus 1 s for each {BODY_RATE} bytes "
            "(--timeout-body)",
            code="request_timeout",
            headers={"Connection": "close"},
        )


def _has_key(headers: Headers, key: str | None) -> bool:
    """True if the request has this key: as OpenAI's clients send it, or as Anthropic's do."""
    scheme, _, bearer_key = headers.get("authorization", "").partition(" ")
    bearer = scheme.lower() == "bearer" and _equals_key(bearer_key, key)
    return bearer or _equals_key(headers.get("x-api-key", ""), key)


def _equals_key(value: str, key: str | None) -> bool:
    # compare_digest takes the same time for every wrong key, so that nobody can guess it letter by letter.
    return key is not None and hmac.compare_digest(value.strip().encode("latin-1"), key.encode())


def _request_id(value: str) -> str:
    """The client's id if it is valid, else a new one."""
    return value if _REQUEST_ID.fullmatch(value) else uuid.uuid4().hex


def _with_request_id(send: Send, request_id: str) -> Send:
    """`send` that adds the header X-Request-Id."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["X-Request-Id"] = request_id
        await send(message)

    return send_with_id
