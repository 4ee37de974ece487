"""What is known of one request, from its arrival to the end of its answer, for a trace.

The numbers are those that metrics need anyway: a trace costs nothing for each token.

Question: What is in the OpenTelemetry span of a request, and who sends it?
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.core.request import SamplingParams
from moesaic.server.meter import Times
from moesaic.trace.logs import REQUEST

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
"""Path of a traced request -> its operation, as OpenTelemetry's conventions call it."""


@dataclass
class RequestTrace:
    """What is known of an HTTP request for an answer. Times are seconds on the monotonic clock."""

    request_id: str
    """The id in log lines and in the header X-Request-Id."""
    path: str
    parent: dict[str, str]
    """The request's headers traceparent and tracestate, where it has them."""
    start: float
    wall_ns: int
    """`start` in nanoseconds since 1970."""
    end: float = 0.0
    status: int | None = None
    """The HTTP status of the answer. None if the answer did not begin."""
    error_status: int | None = None
    """The status of the error that ended the request. A stream may have begun with 200 before."""
    error: str = ""
    """The code or type of the error that ended the request, as in the body of the answer."""
    model: str | None = None
    """The model that the request names."""
    params: SamplingParams | None = None
    """Parameters of the first prompt. None if nothing was submitted to the engine."""
    prompt_tokens: int = 0
    """Tokens of all prompts."""
    completions: list[Times] = field(default_factory=list)
    """n completions of each prompt. The engine updates them until the request has ended."""

    @property
    def operation(self) -> str:
        return OPERATIONS[self.path]

    def record_submission(self, prompt_tokens: int, params: SamplingParams, times: list[Times]) -> None:
        """Note that a prompt went to the engine."""
        self.params = self.params or params
        self.prompt_tokens += prompt_tokens
        self.completions += times

    def record_error(self, status: int, error: str) -> None:
        """Note the error that is sent to the client."""
        self.error_status, self.error = status, error

    def wall(self, moment: float) -> int:
        """A time on the monotonic clock in nanoseconds since 1970."""
        return self.wall_ns + round((moment - self.start) * 1e9)


TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""The trace of the request that this task answers. None without --otlp-traces-endpoint."""


class Tracing:
    """ASGI middleware: calls `write` with the trace of each request for an answer, once that has ended.

    It stands behind the guard, so requests without the key leave no trace.
    """

    def __init__(self, app: ASGIApp, write: Callable[[RequestTrace], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        parent = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        trace = RequestTrace(REQUEST.get(), scope["path"], parent, time.monotonic(), time.time_ns())

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)

        token = TRACE.set(trace)
        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            trace.record_error(500, "server_error")
            raise
        finally:
            TRACE.reset(token)
            trace.end = time.monotonic()
            self._write(trace)
