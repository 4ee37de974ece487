"""Settings of `serve` and `run-batch` beside the command line: MOESAIC_* variables and a YAML file.

The command line takes precedence over variables, and variables over the file. cyclopts reads YAML and
variables itself, but by the rules of YAML 1.1, without line numbers, and without a word on unknown variables.

Question: Where do settings come from beside the command line?
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Token

from moesaic.commands import suggestions
from moesaic.core.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts import App, Argument, ArgumentCollection

    from moesaic.commands.yaml_settings import Setting

PREFIX = "MOESAIC_"
FILE = "--config"
COMMANDS = ("serve", "run-batch")
SECRET = ("--api-key", "--admin-key")
"""Flags whose values are never printed."""
SOURCE = "settings"
"""Source of the tokens that this module makes. Their keyword is the variable, or the file's line and key."""
_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class ChosenSetting:
    """A setting that does not come from the command line."""

    flag: str
    name: str
    """The variable of the setting, or "FILE:LINE: KEY"."""
    display: str
    """Variable or key, with its value. Example: "port=8000"."""
    file: str | None
    """The file; None for a variable."""


class Settings:
    """Fills in what the command line of one command leaves open.

    cyclopts calls it with the parsed command line. variables: the environment's variables that begin with
    MOESAIC_. warn: gets a line on variables that are no flags.
    """

    def __init__(self, variables: Mapping[str, str], root: App, warn: Callable[[str], None]) -> None:
        """root: the application, with all commands."""
        self._variables = variables
        self._root = root
        self._warn = warn
        self._chosen_settings: list[ChosenSetting] = []

    def __call__(self, app: App, commands: Sequence[str], arguments: ArgumentCollection) -> None:
        unknown_names = [name for name in sorted(self._variables) if not self._take_variable(name, arguments)]
        self._warn_of(unknown_names, tuple(commands))
        file = next((argument for argument in arguments if FILE in argument.names), None)
        if file is not None and file.tokens:
            from moesaic.commands import yaml_settings

            for setting in yaml_settings.read(Path(file.tokens[-1].value)):
                self._take_key(setting, tuple(commands), arguments)

    def line(self) -> str | None:
        """What was taken, in one line. None if nothing was."""
        files = {setting.file: None for setting in self._chosen_settings if setting.file}
        groups = [("the environment", None), *((file, file) for file in files)]
        parts = []
        for origin, file in groups:
            displays = [setting.display for setting in self._chosen_settings if setting.file == file]
            if displays:
                parts.append(f"from {origin}: {', '.join(displays)}")
        return "; ".join(parts) or None

    def name_source(self, message: str) -> str:
        """An error's message that begins with a flag, with the variable or the file's key in its place."""
        flag, colon, text = message.partition(":")
        names = {setting.flag: setting.name for setting in self._chosen_settings}
        return f"{names.get(flag, flag)}{colon}{text}"

    def _take_variable(self, name: str, arguments: ArgumentCollection) -> bool:
        """Use a variable, if the command line has no such flag. False if no flag is named after it."""
        flag = _flag(name)
        argument = _argument(flag, arguments)
        if argument is None:
            return False
        if not argument.tokens:
            value = self._variables[name]
            if value.startswith("tcp://"):
                allowed_values = (
                    "no address: Kubernetes sets this variable for a service named moesaic; rename it"
                )
                raise ConfigError.field(name, value, allowed_values)
            values = value.split() if _takes_list(argument) else [value]
            self._add(
                argument,
                flag,
                values,
                ChosenSetting(argument.name, name, _display(name, argument, value), None),
            )
        return True

    def _take_key(self, setting: Setting, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Use a key of the file, if neither command line nor variables have it."""
        flag = "--" + setting.key.replace("_", "-")
        name, text = f"{setting.place}: {setting.key}", ", ".join(setting.values)
        argument = _argument(flag, arguments)
        if argument is None or argument.name == FILE:
            hint = "" if argument is not None else suggestions.suggest(flag, commands, self._root)
            allowed_values = f"flags of moesaic {' '.join(commands)}, without {FILE}. {hint}".rstrip()
            value = "a key" if "key" in flag else text  # a misspelt --api-key is not printed either
            raise ConfigError.field(name, value, allowed_values)
        # The command line and the variables were read before, and they take precedence.
        if argument.tokens:
            return
        takes_list = _takes_list(argument)
        values = setting.values if takes_list or not setting.is_list else [",".join(setting.values)]
        if setting.is_list and not setting.values:
            raise ConfigError.field(name, "[]", "a value, or leave the key out")
        file = setting.place.rpartition(":")[0]
        self._add(
            argument,
            flag,
            values,
            ChosenSetting(argument.name, name, _display(setting.key, argument, text), file),
        )

    def _add(self, argument: Argument, flag: str, values: Sequence[str], setting: ChosenSetting) -> None:
        self._chosen_settings.append(setting)
        if flag in argument.negatives:
            values = [_opposite(setting.name, value) for value in values]
        for index, value in enumerate(values):
            if _wants_integer(argument) and not _INTEGER.fullmatch(value):  # cyclopts would round 8.5
                raise ConfigError.field(setting.name, value, "an integer")
            argument.append(Token(keyword=setting.name, value=value, source=SOURCE, index=index))

    def _warn_of(self, names: Sequence[str], commands: tuple[str, ...]) -> None:
        """Warn of variables that are flags of no command with variables."""
        if not names:
            return
        known_flags = suggestions.flags_of(COMMANDS, self._root)
        ignored_names = [name for name in names if _flag(name) not in known_flags]
        hints = [suggestions.suggest(_flag(name), commands, self._root) for name in ignored_names]
        proposals = [re.sub(r"--[a-z-]+", lambda match: _variable(match[0]), hint) for hint in hints if hint]
        if ignored_names:
            self._warn(
                " ".join([f"ignored, since no flag is named so: {', '.join(ignored_names)}.", *proposals])
            )


def _argument(flag: str, arguments: ArgumentCollection) -> Argument | None:
    """The argument with this flag, positive or negative. None without one."""
    return next(
        (
            argument
            for argument in arguments
            if argument.parse and flag in (*argument.names, *argument.negatives)
        ),
        None,
    )


def _takes_list(argument: Argument) -> bool:
    return bool(argument.token_count()[1])


def _wants_integer(argument: Argument) -> bool:
    return argument.hint is int or int in typing.get_args(argument.hint)


def _flag(variable: str) -> str:
    """Example: "MOESAIC_MAX_NUM_SEQS" -> "--max-num-seqs"."""
    return "--" + variable.removeprefix(PREFIX).lower().replace("_", "-")


def _variable(flag: str) -> str:
    """The inverse of `_flag`."""
    return PREFIX + flag.removeprefix("--").upper().replace("-", "_")


def _display(name: str, argument: Argument, value: str) -> str:
    return f"{name} (not shown)" if argument.name in SECRET else f"{name}={value}"


def _opposite(name: str, value: str) -> str:
    """The other boolean. Raises ConfigError for anything else."""
    if value.lower() not in ("true", "false"):
        raise ConfigError.field(name, value, "true or false")
    return "false" if value.lower() == "true" else "true"
