"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

PATHS = "/v1/messages"
"""Paths that begin so have errors in this form."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(BaseModel):
    """The description of an error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of every answer of these endpoints that is not a success."""

    type: Literal["error"]
    error: AnthropicErrorDetail


def make_anthropic_error(status: int, message: str) -> dict[str, Any]:
    """What an error with this HTTP status says, apart from its own type "error"."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"error": {"type": kind, "message": message}}
