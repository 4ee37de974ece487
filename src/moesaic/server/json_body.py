"""Parses bodies as standard JSON: NaN, Infinity and lone surrogates are errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from moesaic.server.errors import Problem

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(body: bytes) -> Any:
    """Parse a JSON text. Raises json.JSONDecodeError or Problem."""
    try:
        value = json.loads(body, parse_constant=_refuse)
        if _SURROGATE_ESCAPE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except UnicodeError as error:
        raise Problem(400, "the body is not valid Unicode text") from error
    except RecursionError as error:
        raise Problem(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise Problem(400, f"the body: {error}") from error
    return value


class StrictJsonRoute(APIRoute):
    """A route that parses its body with `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
