"""Maps exceptions to HTTP answers in OpenAI's error format, or in Anthropic's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from moesaic.core.errors import (
    ContextLengthError,
    EngineDeadError,
    MoesaicError,
    NonFiniteLogitsError,
    OverloadedError,
    RendererError,
    RequestError,
    ScalingError,
)
from moesaic.server.anthropic import errors as anthropic
from moesaic.server.request_trace import TRACE

_MAX_VALUE_CHARACTERS = 80
"""Maximum number of characters of a wrong value that a message repeats."""

_INVALID = "invalid_request_error"
_UNAVAILABLE = "service_unavailable"


class NotServingError(MoesaicError):
    """The server does not serve yet or any more (HTTP 503). `retry_after`: seconds to wait, or None."""

    def __init__(self, message: str, code: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class UnknownModelError(MoesaicError):
    """The request names a model that is not served (HTTP 404)."""


class ErrorDetail(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Problem(HTTPException):
    """An error as it is sent to the client: HTTP status, headers and body."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = _INVALID,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_message: str | None = None,
    ) -> None:
        """anthropic_message: the message in Anthropic's API. None: the same."""
        super().__init__(status, message, None if headers is None else dict(headers))
        # A client's field name may contain a lone surrogate, which the answer cannot repeat.
        clean = [None if text is None else text.encode(errors="replace").decode() for text in (param, code)]
        text = message.encode(errors="replace").decode()
        self._anthropic_message = text if anthropic_message is None else anthropic_message
        self.body = ErrorResponse(error=ErrorDetail(message=text, type=kind, param=clean[0], code=clean[1]))

    def json(self, path: str = "") -> str:
        """The body of the answer to a request for `path`, in the form of its API."""
        if path.startswith(anthropic.PATHS):
            detail = anthropic.make_anthropic_error(self.status_code, self._anthropic_message)
            return json.dumps({"type": "error", **detail})
        return self.body.model_dump_json()

    def response(self, path: str = "") -> Response:
        """The answer to a request for `path`."""
        return Response(self.json(path), self.status_code, self.headers, "application/json")


def make_problem(error: Exception) -> Problem:
    """The answer to an exception, which the trace of the request notes.

    An unknown exception is a bug in moesaic: status 500 without details.
    """
    problem = _map_to_problem(error)
    trace = TRACE.get()
    if trace is not None:
        trace.record_error(problem.status_code, problem.body.error.code or problem.body.error.type)
    return problem


def _map_to_problem(error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case ContextLengthError():
            return Problem(
                400,
                str(error),
                param=error.field,
                code=error.code,
                anthropic_message=error.anthropic_message,
            )
        case RequestError():
            return Problem(400, str(error), param=error.field, code=error.code)
        case UnknownModelError():
            return Problem(404, str(error), param="model", code="model_not_found")
        case OverloadedError():
            headers = _retry(error.retry_after)
            return Problem(429, str(error), "rate_limit_error", code="rate_limit_exceeded", headers=headers)
        case NotServingError():
            return Problem(503, str(error), _UNAVAILABLE, code=error.code, headers=_retry(error.retry_after))
        case ScalingError(conflict=True):
            return Problem(409, str(error), code="scaling_conflict")
        case ScalingError():
            return Problem(503, str(error), _UNAVAILABLE, code="scaling_failed")
        case RendererError():
            return Problem(503, str(error), _UNAVAILABLE, code="no_renderer")
        case NonFiniteLogitsError():
            return Problem(500, str(error), "server_error", code="non_finite_logits")
        case EngineDeadError():
            return Problem(503, str(error), _UNAVAILABLE, code="engine_dead")
        case RequestValidationError():
            return _problem_of_validation(error.errors())
        case HTTPException():
            return Problem(error.status_code, str(error.detail), headers=error.headers)
    return Problem(500, "internal error of the server; see the server's log", "server_error")


def install_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's format, or in Anthropic's where that is the path's."""
    for kind in (MoesaicError, Problem, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    return make_problem(error).response(request.url.path)


def _retry(seconds: float | None) -> dict[str, str]:
    # The header has whole seconds. 0 would make clients try again at once.
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def _problem_of_validation(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """The answer that names the first wrong field and the reason.

    A union reports an error for each of its members. The client most likely meant the member whose error is
    deepest, and furthest along in lists.
    """
    errors_by_place = [(tuple(error["loc"])[1:], error) for error in errors]
    field = next((place[0] for place, _ in errors_by_place if place), None)
    if not isinstance(field, str):
        return Problem(400, _whole_body(errors[0]))
    field_errors = [(place, error) for place, error in errors_by_place if place and place[0] == field]
    # The deepest error belongs to the union's member that the client most likely meant.
    place, error = max(field_errors, key=lambda place_and_error: _depth(place_and_error[0]))
    name = format_path(place)
    rivals = [
        other_error
        for other_place, other_error in field_errors
        if _depth(other_place) == _depth(place) and format_path(other_place) == name
    ]
    match error["type"]:
        case "extra_forbidden":
            return Problem(
                400, f"{name}: not a parameter of this endpoint", param=field, code="unknown_parameter"
            )
        case "none_required":
            return Problem(
                400, f"{name}: not supported; leave it out", param=field, code="unsupported_parameter"
            )
        case "missing":
            return Problem(400, f"{name}: missing", param=field, code="missing_required_parameter")
    reasons = dict.fromkeys(str(rival["msg"]).removeprefix("Value error, ") for rival in rivals)
    return Problem(400, f"{name}: got {show_value(error['input'])}; {' or '.join(reasons)}", param=field)


def _whole_body(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
        case "missing":
            return "the body is empty; a JSON object is needed"
    if isinstance(error["input"], bytes):
        return "the body is not JSON: send it with the header Content-Type: application/json"
    return f"the body: {error['msg']}"


def _depth(place: Sequence[object]) -> tuple[int, list[int]]:
    """The depth of an error in the body, and the list indices on its path."""
    return len(place), [step for step in place if isinstance(step, int)]


def format_path(place: Sequence[object]) -> str:
    """The path of a field. ('messages', 0, 'content', 'list[TextPart]', 1) -> 'messages[0].content[1]'."""
    return "".join(_steps(place)).removeprefix(".")


def _steps(place: Sequence[object]) -> Iterator[str]:
    for step in place:
        if isinstance(step, int):
            yield f"[{step}]"
        elif isinstance(step, str) and step.isidentifier() and step not in ("str", "int", "float"):
            yield f".{step}"


def show_value(value: object) -> str:
    """`value` as a message repeats it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."
