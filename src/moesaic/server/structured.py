"""The form that a request wants for its answer: response_format, structured_outputs and their older names."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.core.request import SamplingParams
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.server.requests import Body, GenerationRequest, ResponseFormat
from moesaic.server.service import Service
from moesaic.text.structured.grammar import check

LOG = logging.getLogger(__name__)
_ROOT = "structured_outputs"
_GUIDED = ("json", "regex", "choice", "grammar", "json_object")


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form of the answer. None for free text.

    Raises RequestError, naming the field, for several forms or for one that is not complete.
    """
    given, source = _given(body)
    if given is None:
        return None
    with named(source):
        return StructuredOutputsParams.from_mapping(
            {name: value for name, value in given.items() if value is not None}
        )


async def require_grammar(params: SamplingParams, body: GenerationRequest, service: Service) -> None:
    """Raise RequestError, naming the field, if the form of the answer is not valid or too complex.

    Raises OverloadedError if no thread was free for too long.
    """
    form = params.structured_outputs
    if form is None:
        return
    special = service.tokenizer.special_tokens
    with named(_given(body)[1]):
        await service.text_threads.run(lambda: check(form, special))


def _given(body: GenerationRequest) -> tuple[dict[str, Any] | None, str]:
    """The fields of the form, and the field of the body that has them."""
    found: dict[str, dict[str, Any]] = {}
    if body.structured_outputs is not None:
        found[_ROOT] = _known(body.structured_outputs)
    if body.response_format is not None and body.response_format.type != "text":
        found["response_format"] = _of_response_format(body.response_format)
    for name in _GUIDED:
        if (value := getattr(body, f"guided_{name}")) not in (None, False):
            _warn_of_old_name(name)
            found[f"guided_{name}"] = {name: value, "whitespace_pattern": body.guided_whitespace_pattern}
    if len(found) > 1:
        names = ", ".join(found)
        raise RequestError(f"{_ROOT}: got {names}; allowed: one of them", next(iter(found)))
    return next(((form, source) for source, form in found.items()), (None, ""))


def _of_response_format(given: ResponseFormat) -> dict[str, Any]:
    match given.type:
        case "json_schema":
            if given.json_schema is None:
                raise RequestError(
                    "response_format.json_schema: it is missing", "response_format.json_schema"
                )
            schema = given.json_schema.schema_
            return {"json_object": True} if schema is None else {"json": schema}
        case "structural_tag":
            structures = [_known(one) for one in given.structures or []]
            return {"structural_tag": {"structures": structures, "triggers": given.triggers or []}}
        case _:
            return {"json_object": True}


def _known(body: Body) -> dict[str, Any]:
    """The fields of a body, without those that it does not define: they are ignored."""
    return body.model_dump(by_alias=True, exclude=set(body.model_extra or ()))


@contextmanager
def named(source: str) -> Generator[None]:
    """Errors about the engine's field "structured_outputs" name the field that the client sent."""
    try:
        yield
    except RequestError as error:
        if source == _ROOT or error.field is None or not error.field.startswith(_ROOT):
            raise
        raise RequestError(str(error).replace(error.field, source, 1), source, error.code) from error


@cache
def _warn_of_old_name(name: str) -> None:
    LOG.warning("guided_%s is the older name of structured_outputs.%s, and may be removed", name, name)
