"""Reads tables of a TOML file into frozen records, with one line for whatever is wrong."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from moesaic.core.errors import ConfigError

T = TypeVar("T")


def _keep(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Rule:
    """What a field may have."""

    text: str
    """What is allowed, in words."""
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = _keep


def setting(default: Any, rule: Rule) -> Any:
    """A field of a record. default: its value where the file does not have it; MISSING: it must."""
    return field(default=default, metadata={"allowed": rule})


def whole_number(low: int, high: int | None = None) -> Rule:
    """A rule for an integer in a range."""
    top = "" if high is None else f" and at most {high}"

    def good(value: Any) -> bool:
        # isinstance would also accept true and false, which are integers in Python.
        return type(value) is int and value >= low and (high is None or value <= high)

    return Rule(f"an integer of at least {low}{top}", good)


def number(low: float = 0.0, is_exclusive: bool = False) -> Rule:
    """A finite number with a lower limit. is_exclusive: the limit itself is not allowed."""

    def good(value: Any) -> bool:
        fits = type(value) in (int, float) and math.isfinite(value)
        return bool(fits and (value > low if is_exclusive else value >= low))

    return Rule(f"a number {'above' if is_exclusive else 'of at least'} {low:g}", good, float)


def choice(*names: str) -> Rule:
    """A rule for one of some words."""
    return Rule(", ".join(names), lambda value: value in names)


def text(description: str) -> Rule:
    """A rule for a text that is not empty."""
    return Rule(description, lambda value: isinstance(value, str) and bool(value))


def names() -> Rule:
    """A rule for a list of texts that are not empty."""
    good = lambda value: isinstance(value, list) and all(isinstance(item, str) and item for item in value)  # noqa: E731
    return Rule("a list of names", good, tuple)


def flag() -> Rule:
    """A rule for true or false."""
    return Rule("true, false", lambda value: isinstance(value, bool))


def length() -> Rule:
    """A rule for a number of tokens, or the two ends of a range."""

    def good(value: Any) -> bool:
        ends = value if isinstance(value, list) else [value, value]
        return len(ends) == 2 and all(type(end) is int and end >= 1 for end in ends) and ends[0] <= ends[1]

    def convert(value: Any) -> tuple[int, int]:
        return tuple(value) if isinstance(value, list) else (value, value)

    return Rule("an integer of at least 1, or [lowest, highest]", good, convert)


def read(kind: type[T], table: Any, place: str) -> T:
    """The record of a table. place: of the table in the file, with a dot behind it, or "".

    Raises ConfigError for unknown, missing and wrong fields.
    """
    if not isinstance(table, Mapping):
        raise ConfigError.field(place.rstrip("."), table, "a table")
    known_fields = {known_field.name: known_field for known_field in fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in known_fields:
            raise ConfigError.field(
                f"{place}{name}", table[name], f"only these fields: {', '.join(known_fields)}"
            )
    values: dict[str, Any] = {}
    for name, known_field in known_fields.items():
        rule: Rule = known_field.metadata["allowed"]
        if name not in table:
            if known_field.default is MISSING:
                raise ConfigError(f"{place}{name}: it is missing; allowed: {rule.text}")
        elif not rule.accepts(table[name]):
            raise ConfigError.field(f"{place}{name}", table[name], rule.text)
        else:
            values[name] = rule.convert(table[name])
    return kind(**values)


def override(tables: dict[str, Any], change: str) -> None:
    """Change a field of parsed tables. change: KEY=VALUE with a dotted key and a value as in the file.

    Example: {"workers": {"count": 4}} and "workers.count=8" -> {"workers": {"count": 8}}. A value that is no
    TOML is a text. Raises ConfigError for a change of another form.
    """
    key, equals, value = change.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError.field("--set", change, "KEY=VALUE, such as workers.count=8")
    try:
        new_value = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        new_value = value.strip()
    inner: Any = tables
    for name in path[:-1]:
        inner = _descend(inner, name, change)
    if isinstance(inner, list):
        inner[_index(inner, path[-1], change)] = new_value
    elif isinstance(inner, dict):
        inner[path[-1]] = new_value
    else:
        raise ConfigError.field("--set", change, "a key of a table")


def _descend(outer: Any, name: str, change: str) -> Any:
    if isinstance(outer, list):
        return outer[_index(outer, name, change)]
    if isinstance(outer, dict):
        return outer.setdefault(name, {})
    raise ConfigError.field("--set", change, "a key of a table")


def _index(values: list[Any], name: str, change: str) -> int:
    if not name.isdecimal() or int(name) >= len(values):
        raise ConfigError.field("--set", change, f"a number from 0 to {len(values) - 1} in place of {name}")
    return int(name)
