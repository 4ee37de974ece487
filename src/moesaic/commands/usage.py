"""Formats the help of the command line, and turns its errors into one line that names the flag."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import cyclopts
from cyclopts import exceptions
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel

from moesaic.commands import flag_groups, settings, suggestions

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

NAMES = "--served-model-name"
KINDS = {int: "an integer", float: "a number", bool: "true or false"}


class GroupedFlags(DefaultFormatter):
    """Formats the help of a command: flags in groups, with short flags next to the long ones."""

    def __init__(self, shorts: Mapping[str, str], explain_all: bool = False) -> None:
        """shorts: short flag -> long flag, as "-o" -> "--output-file". explain_all: explain every flag of a
        command with many flags, not only the essential ones."""
        super().__init__()
        self._shorts = shorts
        self._explain_all = explain_all

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        for part in self._parts(panel):
            super().__call__(console, options, part)

    def _parts(self, panel: HelpPanel) -> list[HelpPanel]:
        entries = [
            entry.copy(positive_shorts=(*entry.positive_shorts, *self._short_flags(entry.positive_names)))
            for entry in panel.entries
        ]
        groups = {
            title: [flag_entry for flag_entry in entries if set(flags) & set(flag_entry.positive_names)]
            for title, flags in flag_groups.GROUPS.items()
        }
        filled_groups = {title: group for title, group in groups.items() if group}
        if panel.format != "parameter" or sum(map(len, filled_groups.values())) < max(
            len(entries), flag_groups.GROUPED_FROM
        ):
            return [panel.copy(entries=entries)]
        if self._explain_all:
            return [panel.copy(title=title, entries=group) for title, group in filled_groups.items()]
        essential = [
            flag_entry
            for flag_entry in entries
            if set(flag_groups.ESSENTIAL) & set(flag_entry.positive_names)
        ]
        group_entries = [
            HelpEntry(positive_names=(title,), description=_flags_of(group))
            for title, group in filled_groups.items()
        ]
        return [
            panel.copy(title="Essential flags", entries=essential),
            panel.copy(title="All flags, which --help-all explains", entries=group_entries),
        ]

    def _short_flags(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(short for short, long in self._shorts.items() if long in names)


def _flags_of(entries: list[HelpEntry]) -> str:
    """The names of the flags in one text. Example: "--threads, --mmap"."""
    return ", ".join(next(n for n in entry.positive_names if n.startswith("--")) for entry in entries)


def one_line(error: cyclopts.CycloptsError, app: cyclopts.App) -> str:
    """The message of a cyclopts error, in the form "flag: got value; allowed: values"."""
    match error:
        case cyclopts.CoercionError() if error.argument is not None and error.argument.tokens:
            # A token of a variable or of a file has the place that names it as its keyword.
            token = error.argument.tokens[-1]
            flag = token.keyword if token.source == settings.SOURCE else error.argument.name
            return f"{flag}: got {token.value!r}; allowed: {describe_values(error.argument.hint)}"
        case cyclopts.MissingArgumentError() if error.argument is not None:
            flag, value = error.argument.name, _word_after(error.argument.name, error.root_input_tokens or [])
            if flag == "--model" and NAMES in (error.root_input_tokens or []):
                return f"MODEL: got nothing: all words after {NAMES} are names; write MODEL before it"
            return f"{flag}: got {value}; allowed: {describe_values(error.argument.hint)}"
        case exceptions.UnknownOptionError():
            flag = error.token.keyword or error.token.value.partition("=")[0]
            hint = suggestions.suggest(flag, error.command_chain or (), app)
            return f"Unknown option: {flag}. {hint}".rstrip()
        case exceptions.UnusedCliTokensError():
            extra = " ".join(error.unused_tokens or [])
            return f"got {extra!r}, which is not an argument of this command; see --help"
    return " ".join(str(error).split())


def _word_after(flag: str, words: list[str]) -> str:
    """The word after a flag that got no value. The parser does not accept a word with a hyphen as a value."""
    values = [value for word, value in pairwise(words) if word == flag and not value.startswith("--")]
    return repr(values[-1]) if values else "nothing"


def describe_values(hint: object) -> str:
    """The values that a flag of type `hint` accepts, in words."""
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
