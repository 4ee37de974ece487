"""Checks the API key and the size of every request, and gives it an id, before any route sees it."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.server.errors import Problem

MAX_BODY_BYTES = 32 * 2**20
OPEN_PATHS = frozenset({"/health", "/metrics", "/ping", "/version", "/openapi.json"})
"""Paths that need no key. All others need one, also those that do not exist."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


class Guard:
    """ASGI middleware. api_key: the key that clients must send; None means that no key is needed."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identified = _with_request_id(send, headers.get("x-request-id", ""))
        problem = self._problem(scope["path"], headers)
        if problem is None:
            await self._app(scope, self._limited(receive), identified)
        else:
            await problem.response()(scope, receive, identified)

    def _problem(self, path: str, headers: Headers) -> Problem | None:
        if path not in OPEN_PATHS and not self._authorised(headers):
            return Problem(
                401,
                "wrong or missing API key; send it as the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        return self._too_large() if length.isdecimal() and int(length[:20]) > self._max_body_bytes else None

    def _authorised(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)

    def _too_large(self) -> Problem:
        return Problem(
            413,
            f"the body is larger than {self._max_body_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that raises if the body is too large. It also works without a Content-Length header."""
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise self._too_large()
            return message

        return limited


def _with_request_id(send: Send, given: str) -> Send:
    """`send` that adds the header X-Request-Id: the client's id if it is valid, else a new one."""
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    async def identified(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["X-Request-Id"] = request_id
        await send(message)

    return identified
