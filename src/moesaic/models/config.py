"""Reads config.json. Every key is read, known to change no answer, or refused by name.

Question: Where is an unknown key of config.json refused?
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.models import known_keys

MOST_INTEGER = 2**31 - 1
"""Largest integer of a config. No size of a model comes near it."""
MOST_LAYERS = 1 << 16
"""Largest number of layers. Sizes are kept for each layer, also where there are no weights to bound it."""
MOST_NUMBER = 1e30
"""Largest number of a config that is still far from the limits of float32."""
_REQUIRED = object()
_SHOWN = 80
"""Maximum number of characters of a wrong value that a message repeats."""


def shorten(value: object) -> str:
    """Returns a value of a file as one short line. A name made of printable characters stays as it is."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    text = text.encode("ascii", "backslashreplace").decode()  # a file may hold a lone surrogate
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _refuse(name: str, value: object, allowed_values: str) -> CheckpointError:
    got = shorten(repr(value))
    return CheckpointError(f"config.json: {shorten(name)}: got {got}; allowed: {allowed_values}")


class UnreadKeyError(CheckpointError):
    """A key that nothing reads, and that may change answers. The message has the way to leave it out."""

    path: tuple[str, ...] = ()
    """The names of the objects around the key, and its own."""
    value: object = None

    @classmethod
    def of_key(cls, path: Sequence[str], value: object) -> UnreadKeyError:
        """Returns the error for the key at a path."""
        defaults = sorted({json.dumps(default) for default in known_keys.find_defaults(path[-1])})
        case = (
            f"{' or '.join(defaults)}, transformers' default"
            if defaults
            else "keys that this model_type reads or that are known to change no answer"
        )
        error = cls(
            f"config.json: {shorten('.'.join(path))}: got {shorten(repr(value))}; allowed: {case}. "
            f"If it changes nothing, leave it out: {leave_out(path)}"
        )
        error.path, error.value = tuple(path), value
        return error


def leave_out(path: Sequence[str]) -> str:
    """Returns the flag that drops a key of config.json by hand.

    >>> print(leave_out(("text_config", "gate")))
    --hf-overrides '{"text_config": {"gate": null}}'
    """
    patch: Any = None
    for name in reversed(path):
        patch = {name: patch}
    return write_flag(patch)


def write_flag(patch: dict[str, Any]) -> str:
    """Returns the flag that changes config.json by hand, without its value if that is long."""
    flag = f"--hf-overrides {shlex.quote(json.dumps(patch))}"
    return flag if len(flag) <= 2 * _SHOWN else "--hf-overrides"


def _is_number(value: object) -> bool:
    # In Python a bool is an int, but `true` is no number of a config.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _too_large(value: object, maximum: float) -> str:
    """Returns the upper limit as a part of a message, if `value` exceeds it."""
    return f" and at most {maximum:g}" if _is_number(value) and value > maximum else ""  # type: ignore[operator]


class Fields:
    """The keys of config.json. `done` refuses all keys that were not read.

    Every method that reads a key takes a default for an absent key. Without a default the key is required.
    Each raises CheckpointError that names the key, its value and what is allowed.
    """

    def __init__(self, raw: dict[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix
        self._read_keys: set[str] = set()

    @property
    def names(self) -> list[str]:
        """All keys."""
        return [*self._raw]

    def raw(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns the value without checks."""
        self._read_keys.add(name)
        if name in self._raw:
            return self._raw[name]
        if default is _REQUIRED:
            raise CheckpointError(f"config.json: {shorten(self._prefix + name)} is missing")
        return default

    def integer(
        self, name: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int | None = None
    ) -> int:
        """Returns an integer of at least `minimum`, and at most `maximum` or else MOST_INTEGER."""
        value = self.raw(name, default)
        limit = MOST_INTEGER if maximum is None else maximum
        good = isinstance(value, int) and not isinstance(value, bool)
        if not good or not minimum <= value <= limit:
            large = maximum is not None or (good and value > limit)
            top = f" and at most {limit}" if large else ""
            raise _refuse(self._prefix + name, value, f"an integer of at least {minimum}{top}")
        return int(value)

    def maybe_integer(self, name: str, minimum: int = 1) -> int | None:
        """Returns an integer, or None if the key is null or absent."""
        return None if self.raw(name, None) is None else self.integer(name, minimum=minimum)

    def number(self, name: str, default: Any = _REQUIRED, minimum: float = 0.0) -> float:
        """Returns a number from `minimum` to MOST_NUMBER."""
        value = self.raw(name, default)
        if not _is_number(value) or not minimum <= value <= MOST_NUMBER:
            allowed_numbers = f"a number of at least {minimum:g}{_too_large(value, MOST_NUMBER)}"
            raise _refuse(self._prefix + name, value, allowed_numbers)
        return float(value)

    def number_above(self, name: str, low: float, default: Any = _REQUIRED) -> float:
        """Returns a number greater than `low`, and at most MOST_NUMBER."""
        value = self.raw(name, default)
        if not _is_number(value) or not low < value <= MOST_NUMBER:
            allowed_numbers = f"a number above {low:g}{_too_large(value, MOST_NUMBER)}"
            raise _refuse(self._prefix + name, value, allowed_numbers)
        return float(value)

    def maybe_number(self, name: str, minimum: float = 0.0) -> float | None:
        """Returns a number, or None if the key is null or absent."""
        return None if self.raw(name, None) is None else self.number(name, minimum=minimum)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """Returns true or false."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise _refuse(self._prefix + name, value, "true, false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns a list of integers, which is empty if the key is null or absent."""
        value = self.raw(name, None)
        value = [] if value is None else value
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise _refuse(self._prefix + name, value, "a list of integers")
        return tuple(value)

    def positive_numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of numbers above 0, and at most MOST_NUMBER. The key is required."""
        value = self.raw(name)
        good = isinstance(value, list) and all(_is_number(item) and 0 < item <= MOST_NUMBER for item in value)
        if not good or not value:
            raise _refuse(self._prefix + name, value, "a list of numbers above 0")
        return tuple(map(float, value))

    def words(self, name: str, count: int, allowed_words: Sequence[str], default: list[str]) -> list[str]:
        """Returns a list of `count` of the words `allowed_words`; `default` if the key is null or absent."""
        value = self.raw(name, None)
        value = default if value is None else value
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(item not in allowed_words for item in value)
        ):
            raise _refuse(self._prefix + name, value, f"a list of {count} of {', '.join(allowed_words)}")
        return value

    def require_value(self, name: str, *allowed_values: object, reason: str = "") -> None:
        """Refuses any value but these. The key may be absent."""
        value = self.raw(name, allowed_values[0])
        # The type counts as well, since 1 == True and 1 == 1.0 in Python.
        if not any(value == item and type(value) is type(item) for item in allowed_values):
            text = ", ".join(map(repr, allowed_values)) + (f" ({reason})" if reason else "")
            raise _refuse(self._prefix + name, value, text)

    def child(self, name: str) -> Fields | None:
        """Returns a nested object, which needs its own `done`; None if the key is null or absent."""
        value = self.raw(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _refuse(self._prefix + name, value, "an object or null")
        return Fields(value, f"{self._prefix}{name}.")

    def ignore(self, *names: str) -> None:
        """Accepts keys that do not affect inference, beside those of known_keys.py."""
        self._read_keys.update(names)

    def refuse_unread(self) -> None:
        """Raises UnreadKeyError for the first key that was not read and may change answers."""
        family = None if self._prefix else str(self._raw.get("model_type"))
        for name in sorted(self._raw.keys() - self._read_keys):
            if not known_keys.changes_nothing(name, self._raw[name], family):
                raise UnreadKeyError.of_key((*self._prefix.split(".")[:-1], name), self._raw[name])
