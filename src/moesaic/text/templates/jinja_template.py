"""Compiles and renders a chat template with Jinja. Only renderers do it, since a template may do anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_ERROR_CHARACTERS = 500
"""Maximum number of characters of an error that a message repeats."""


class TemplateRefused(Exception):
    """The template, or Jinja for it, raised an error. The text is one line."""


class TooLong(Exception):
    """The rendered text has more characters than allowed."""


class _Generation(Extension):
    """Parses {% generation %} ... {% endgeneration %} and keeps the text between them.

    Templates mark the model's own text with it, for training.
    """

    tags = {"generation"}  # noqa: RUF012, jinja expects a set here

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """The template of `source`, with what templates use of transformers.

    Raises Refused if it cannot be compiled, and MemoryError.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # a hostile template makes the parser raise anything, such as RecursionError
        raise TemplateRefused(_line(error)) from None


def render_template(template: jinja2.Template, variables: Mapping[str, Any], max_characters: int) -> str:
    """The text of `template`. Raises Refused, MemoryError, and TooLong above `max_characters` characters."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > max_characters:
                raise TooLong
            pieces.append(piece)
        return "".join(pieces)
    except (MemoryError, TooLong):
        raise
    except Exception as error:  # a template may raise anything
        raise TemplateRefused(_line(error)) from None


def _line(error: Exception) -> str:
    """The line that describes an error. It names the kind of an error that is not Jinja's."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{str(error)[:_MAX_ERROR_CHARACTERS]}".split())


def _raise_exception(message: str) -> NoReturn:
    """Refuse a conversation. Chat templates call this function."""
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, **form: Any) -> str:
    """Plain JSON, as in transformers. Jinja's own filter escapes characters for HTML.

    form: indent, separators, sort_keys.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)
