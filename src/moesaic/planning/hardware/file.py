"""Hardware files: TOML with the tables that `moesaic.cost.hardware.from_tables` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import Hardware


def check(path: Path) -> None:
    """Raises ConfigError for a path that cannot become a hardware file, before time is spent on measuring."""
    if path.suffix != ".toml" or path.is_dir() or not path.absolute().parent.is_dir():
        allowed_values = "a file that ends in .toml, in an existing directory"
        raise ConfigError.field("--output-file", str(path), allowed_values)


def save(hardware: Hardware, path: Path) -> None:
    """Write a hardware file, completely or not at all. Raises ConfigError if it cannot be written."""
    new_file = path.with_name(f"{path.name}.new")
    try:
        new_file.write_text(as_toml(hardware.to_tables()), encoding="utf-8")
        new_file.replace(path)
    except OSError as error:
        allowed_values = f"a file to write into ({error.strerror})"
        raise ConfigError.field("--output-file", str(path), allowed_values) from error
    finally:
        new_file.unlink(missing_ok=True)


def as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML of tables with numbers, texts and lists of tables, one line each. Numbers have six digits.

    >>> print(as_toml({"disk": {"gib": 1.25, "reads": [{"readers": 2}]}}), end="")
    [disk]
    gib = 1.25
    reads = [
        { readers = 2 },
    ]
    """
    parts = []
    for name, table in tables.items():
        lines = [f"{key} = {_value(value)}" for key, value in table.items()]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(parts)


def _value(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.1f}"
        case list():
            return "\n".join(["[", *(f"    {_value(item)}," for item in value), "]"])
        case Mapping():
            return f"{{ {', '.join(f'{key} = {_value(inner)}' for key, inner in value.items())} }}"
    raise TypeError(f"{type(value).__name__} in a hardware file")
