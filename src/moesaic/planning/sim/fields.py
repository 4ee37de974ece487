"""Reads tables of a TOML file into frozen records, with one line for whatever is wrong."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from moesaic.core.errors import ConfigError

T = TypeVar("T")


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Allowed:
    """What a field may have."""

    text: str
    """What is allowed, in words."""
    good: Callable[[Any], bool]
    convert: Callable[[Any], Any] = _as_it_is


def setting(default: Any, allowed: Allowed) -> Any:
    """A field of a record. default: its value where the file does not have it; MISSING: it must."""
    return field(default=default, metadata={"allowed": allowed})


def whole(low: int, high: int | None = None) -> Allowed:
    """An integer in a range."""
    top = "" if high is None else f" and at most {high}"

    def good(value: Any) -> bool:
        return type(value) is int and value >= low and (high is None or value <= high)

    return Allowed(f"an integer of at least {low}{top}", good)


def number(low: float = 0.0, above: bool = False) -> Allowed:
    """A finite number with a lower limit. above: the limit itself is not allowed."""

    def good(value: Any) -> bool:
        fits = type(value) in (int, float) and math.isfinite(value)
        return bool(fits and (value > low if above else value >= low))

    return Allowed(f"a number {'above' if above else 'of at least'} {low:g}", good, float)


def choice(*names: str) -> Allowed:
    """One of some words."""
    return Allowed(", ".join(names), lambda value: value in names)


def text(what: str) -> Allowed:
    """A text that is not empty."""
    return Allowed(what, lambda value: isinstance(value, str) and bool(value))


def names() -> Allowed:
    """A list of texts that are not empty."""
    good = lambda value: isinstance(value, list) and all(isinstance(one, str) and one for one in value)  # noqa: E731
    return Allowed("a list of names", good, tuple)


def flag() -> Allowed:
    """true or false."""
    return Allowed("true, false", lambda value: isinstance(value, bool))


def length() -> Allowed:
    """A number of tokens, or the two ends of a range."""

    def good(value: Any) -> bool:
        ends = value if isinstance(value, list) else [value, value]
        return len(ends) == 2 and all(type(end) is int and end >= 1 for end in ends) and ends[0] <= ends[1]

    def convert(value: Any) -> tuple[int, int]:
        return tuple(value) if isinstance(value, list) else (value, value)

    return Allowed("an integer of at least 1, or [lowest, highest]", good, convert)


def read(kind: type[T], table: Any, place: str) -> T:
    """The record of a table. place: of the table in the file, with a dot behind it, or "".

    Raises ConfigError for unknown, missing and wrong fields.
    """
    if not isinstance(table, Mapping):
        raise ConfigError.field(place.rstrip("."), table, "a table")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            raise ConfigError.field(f"{place}{name}", table[name], f"only these fields: {', '.join(known)}")
    found: dict[str, Any] = {}
    for name, one in known.items():
        allowed: Allowed = one.metadata["allowed"]
        if name not in table:
            if one.default is MISSING:
                raise ConfigError(f"{place}{name}: it is missing; allowed: {allowed.text}")
        elif not allowed.good(table[name]):
            raise ConfigError.field(f"{place}{name}", table[name], allowed.text)
        else:
            found[name] = allowed.convert(table[name])
    return kind(**found)


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
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    inner: Any = tables
    for name in path[:-1]:
        inner = _inside(inner, name, change)
    if isinstance(inner, list):
        inner[_index(inner, path[-1], change)] = parsed
    elif isinstance(inner, dict):
        inner[path[-1]] = parsed
    else:
        raise ConfigError.field("--set", change, "a key of a table")


def _inside(outer: Any, name: str, change: str) -> Any:
    if isinstance(outer, list):
        return outer[_index(outer, name, change)]
    if isinstance(outer, dict):
        return outer.setdefault(name, {})
    raise ConfigError.field("--set", change, "a key of a table")


def _index(values: list[Any], name: str, change: str) -> int:
    if not name.isdecimal() or int(name) >= len(values):
        raise ConfigError.field("--set", change, f"a number from 0 to {len(values) - 1} in place of {name}")
    return int(name)
