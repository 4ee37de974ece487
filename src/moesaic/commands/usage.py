"""What the command line says of itself: short flags in the help; errors in one line that names the flag."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import cyclopts
from cyclopts import exceptions
from cyclopts.help import DefaultFormatter, HelpPanel

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

KINDS = {int: "an integer", float: "a number", bool: "true or false"}


class ShortFlags(DefaultFormatter):
    """The usual help, with short flags beside the long ones that they stand for."""

    def __init__(self, shorts: Mapping[str, str]) -> None:
        """shorts: "-o" -> "--output-file"."""
        super().__init__()
        self._shorts = shorts

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        entries = [
            entry.copy(positive_shorts=(*entry.positive_shorts, *self._of(entry.positive_names)))
            for entry in panel.entries
        ]
        super().__call__(console, options, panel.copy(entries=entries))

    def _of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(short for short, long in self._shorts.items() if long in names)


def one_line(error: cyclopts.CycloptsError) -> str:
    """The message of an error of cyclopts, in our form."""
    match error:
        case cyclopts.CoercionError() if error.argument is not None and error.argument.tokens:
            flag, value = error.argument.name, error.argument.tokens[-1].value
            return f"{flag}: got {value!r}; allowed: {allowed(error.argument.hint)}"
        case cyclopts.MissingArgumentError() if error.argument is not None:
            flag, value = error.argument.name, _behind(error.argument.name, error.root_input_tokens or [])
            return f"{flag}: got {value}; allowed: {allowed(error.argument.hint)}"
        case exceptions.UnusedCliTokensError():
            extra = " ".join(error.unused_tokens or [])
            return f"got {extra!r}, which no argument takes; see --help"
    return " ".join(str(error).split())


def _behind(flag: str, words: list[str]) -> str:
    """What stands behind a flag that was given no value: a word with a hyphen, which is not taken for one."""
    found = [after for word, after in pairwise(words) if word == flag and not after.startswith("--")]
    return repr(found[-1]) if found else "nothing"


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
