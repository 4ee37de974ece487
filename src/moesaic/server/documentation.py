"""Parts of the OpenAPI schema that the models do not define: error answers and streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.security import HTTPBearer
from pydantic import BaseModel

from moesaic.server.errors import ErrorResponse
from moesaic.server.responses import Payload

Responses = dict[int | str, dict[str, Any]]

_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "Wrong or missing API key; for changes, wrong or missing admin key.",
    403: "The header Host is not allowed: see --allowed-hosts. Only without an API key.",
    404: "The model is not served, or the resource does not exist.",
    408: "The body arrived too slowly.",
    409: "The request contradicts the state of the cluster.",
    413: "The body is too large.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    503: "Not serving: loading, shutting down, or the worker is gone.",
}


def errors(*statuses: int, model: type[BaseModel] = ErrorResponse) -> Responses:
    """The error answers with these statuses, for FastAPI's parameter `responses`. model: their body."""
    return {status: {"model": model, "description": _REASONS[status]} for status in statuses}


BODY_ERRORS = errors(400, 401, 403, 404, 408, 413, 503)
GENERATION_ERRORS = BODY_ERRORS | errors(429)
GENERATION_STATUSES = (400, 401, 403, 404, 408, 413, 429, 503)


def describe_stream(chunk: type[Payload]) -> Responses:
    """The successful answer, which is a stream of `chunk` if the request sets `stream`."""
    return _stream(f"With `stream`: events whose data is a {chunk.__name__}, then `[DONE]`.", "data")


def describe_named_events(*last: str) -> Responses:
    """The successful answer, which is a stream of named events if the request sets `stream`.

    last: names of the events that may end it.
    """
    names = " or ".join(f"`{name}`" for name in last)
    return _stream(
        f"With `stream`: a JSON object, whose `type` is the event's name. The last is {names}.",
        "event",
        "data",
    )


def _stream(description: str, *fields: str) -> Responses:
    properties: dict[str, Any] = {name: {"type": "string"} for name in fields}
    properties["data"]["description"] = description
    event = {"type": "object", "properties": properties, "required": list(fields)}
    return {200: {"content": {"text/event-stream": {"itemSchema": event}}}}


class Api(FastAPI):
    """FastAPI without the 422 answers in its schema, since this server never sends them."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema


bearer = HTTPBearer(auto_error=False, description="The server's --api-key.")
"""Documents the API key in the schema. The guard checks it."""
