"""Errors of the command line in one line: which flag, which value, what is allowed."""

from __future__ import annotations

import typing
from typing import Literal

import cyclopts
from cyclopts import exceptions

KINDS = {int: "an integer", float: "a number", bool: "true or false"}


def one_line(error: cyclopts.CycloptsError) -> str:
    """The message of an error of cyclopts, in our form."""
    match error:
        case cyclopts.CoercionError() if error.argument is not None and error.argument.tokens:
            flag, value = error.argument.name, error.argument.tokens[-1].value
            return f"{flag}: got {value!r}; allowed: {allowed(error.argument.hint)}"
        case cyclopts.MissingArgumentError() if error.argument is not None:
            return f"{error.argument.name}: got nothing; allowed: {allowed(error.argument.hint)}"
        case exceptions.UnusedCliTokensError():
            extra = " ".join(error.unused_tokens or [])
            return f"got {extra!r}, which no argument takes; see --help"
    return " ".join(str(error).split())


def allowed(hint: object) -> str:
    """What a flag of type `hint` takes, in words."""
    choices = [choice for part in _parts(hint) for choice in _literals(part)]
    if choices:
        return ", ".join(map(str, choices))
    return next(
        (KINDS[part] for part in _parts(hint) if isinstance(part, type) and part in KINDS),
        "a value, see --help",
    )


def _parts(hint: object) -> list[object]:
    """The members of a union, or the hint itself."""
    members = [] if typing.get_origin(hint) is Literal else list(typing.get_args(hint))
    return members or [hint]


def _literals(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
