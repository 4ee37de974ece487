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
_GUIDED_FORMS = ("json", "regex", "choice", "grammar", "json_object")


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form of the answer. None for free text.

    Raises RequestError, naming the field, for several forms or for one that is not complete.
    """
    form, source = _find_form(body)
    if form is None:
        return None
    with translate_field(source):
        return StructuredOutputsParams.from_mapping(
            {name: value for name, value in form.items() if value is not None}
        )


async def require_grammar(params: SamplingParams, body: GenerationRequest, service: Service) -> None:
    """Raise RequestError, naming the field, if the form of the answer is not valid or too complex.

    Raises OverloadedError if no thread was free for too long.
    """
    form = params.structured_outputs
    if form is None:
        return
    special = service.tokenizer.special_tokens
    with translate_field(_find_form(body)[1]):
        await service.text_threads.run(lambda: check(form, special))


def _find_form(body: GenerationRequest) -> tuple[dict[str, Any] | None, str]:
    """The fields of the form, and the field of the body that has them."""
    forms: dict[str, dict[str, Any]] = {}
    if body.structured_outputs is not None:
        forms[_ROOT] = _dump_known_fields(body.structured_outputs)
    if body.response_format is not None and body.response_format.type != "text":
        forms["response_format"] = _of_response_format(body.response_format)
    if body.ebnf is not None:
        forms["ebnf"] = {"grammar": body.ebnf}
    for name in _GUIDED_FORMS:
        # guided_json_object: false asks for nothing.
        if (value := getattr(body, f"guided_{name}")) not in (None, False):
            _warn_of_old_name(name)
            forms[f"guided_{name}"] = {name: value, "whitespace_pattern": body.guided_whitespace_pattern}
    if len(forms) > 1:  # an answer can have one form only
        names = ", ".join(forms)
        raise RequestError(f"{_ROOT}: got {names}; allowed: one of them", next(iter(forms)))
    return next(((form, source) for source, form in forms.items()), (None, ""))


def _of_response_format(response_format: ResponseFormat) -> dict[str, Any]:
    match response_format.type:
        case "json_schema":
            if response_format.json_schema is None:
                raise RequestError(
                    "response_format.json_schema: it is missing", "response_format.json_schema"
                )
            schema = response_format.json_schema.schema_
            return {"json_object": True} if schema is None else {"json": schema}
        case "structural_tag":
            structures = [_dump_known_fields(structure) for structure in response_format.structures or []]
            return {"structural_tag": {"structures": structures, "triggers": response_format.triggers or []}}
        case _:
            schema = response_format.schema_
            return {"json_object": True} if schema is None else {"json": schema}


def _dump_known_fields(body: Body) -> dict[str, Any]:
    """The fields of a body, without those that it does not define: they are ignored."""
    return body.model_dump(by_alias=True, exclude=set(body.model_extra or ()))


@contextmanager
def translate_field(source: str) -> Generator[None]:
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
