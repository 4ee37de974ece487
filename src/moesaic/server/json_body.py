"""Parses bodies as standard JSON: NaN, Infinity and lone surrogates are errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from moesaic.server import unknown_fields
from moesaic.server.errors import Problem

MOST_CONTAINERS = 1 << 18
"""Maximum number of lists and objects in a body. The event loop validates them one by one."""
MOST_ITEMS = 1 << 22
"""Maximum number of commas in a body that separate items, such as the token ids of prompts."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, or the rest of a body that ends inside of one."""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(body: bytes) -> Any:
    """Parse a JSON text. Raises json.JSONDecodeError or Problem."""
    _check_size(body)
    try:
        value = json.loads(body, parse_constant=_refuse)
        # Only an escape can make a lone surrogate: its raw bytes are no UTF-8, which json refuses.
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
    """A route that parses its body with `parse`. Its answer names the fields that were ignored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            response = await handler(strict)
            unknown_fields.show(strict, response)
            return response

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def _check_size(body: bytes) -> None:
    """Raise Problem for a body that would hold the event loop for seconds."""
    _check_count(body.count(b'"'), "quotation marks", MOST_ITEMS)  # what `_STRING` looks at one by one
    for description, signs, limit in (
        ("lists and objects", (b"[", b"{"), MOST_CONTAINERS),
        ("items", (b",",), MOST_ITEMS),
    ):
        if sum(map(body.count, signs)) > limit:  # most of them may be in texts
            body = _STRING.sub(b"", body)
            _check_count(sum(map(body.count, signs)), description, limit)


def _check_count(count: int, description: str, limit: int) -> None:
    if count > limit:
        raise Problem(400, f"the body: got {count} {description}; allowed: at most {limit}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
