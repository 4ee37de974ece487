"""Answers web pages of other origins (CORS).

It stands in front of the guard, since a browser's preflight request carries no key, and since a page may read
an error only if it has the headers too.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.config import CorsConfig
from moesaic.server.errors import Problem, show_value
from moesaic.server.unknown_fields import HEADER as IGNORED_FIELDS

READABLE = ("Retry-After", "X-Request-Id", IGNORED_FIELDS)
"""Headers of answers that pages may read beside those that every page may read."""


class Cors(CORSMiddleware):
    """starlette's middleware, with errors in OpenAI's format. Without origins it adds no header."""

    def __init__(self, app: ASGIApp, config: CorsConfig) -> None:
        super().__init__(
            app,
            allow_origins=config.origins,
            allow_methods=config.methods,
            allow_headers=config.headers,
            allow_credentials=config.allow_credentials,
            expose_headers=READABLE,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        if not self.allow_origins:
            message = (
                "this server takes no calls of web pages of other origins; --allowed-origins allows them"
            )
            return Problem(403, message, code="cors_not_allowed").response()
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        message = bytes(answer.body).decode().removeprefix("Disallowed CORS ")
        header_values = ", ".join(
            show_value(request_headers.get(name, ""))
            for name in ("origin", "access-control-request-method", "access-control-request-headers")
        )
        choices = "what --allowed-origins, --allowed-methods and --allowed-headers name"
        headers = {"Vary": answer.headers["Vary"]}
        return Problem(
            403,
            f"CORS {message}: got {header_values}; allowed: {choices}",
            code="cors_not_allowed",
            headers=headers,
        ).response()

    async def simple_response(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers
    ) -> None:
        if self.allow_origins:
            await super().simple_response(scope, receive, send, request_headers)
        else:
            await self.app(scope, receive, send)
