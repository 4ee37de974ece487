"""Reads a YAML file of settings: flags as keys, and as values what one would type on the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A key of a file of settings, with its values."""

    place: str
    """Where the key stands. Example: "server.yaml:3"."""
    key: str
    """The key as written, such as "max-num-seqs" or "max_num_seqs"."""
    values: list[str]
    """The value as text, or the items of a list. A mapping is one text, in JSON."""
    is_list: bool


def read(file: Path) -> list[Setting]:
    """The settings in `file`, in its order.

    Scalars stay as they are written. YAML 1.1 would make False of `numa: off`, and 124 of `autoscale: 2:4`.
    Raises ConfigError if `file` cannot be read, is no mapping, or has a key twice.
    """
    try:
        # compose keeps scalars as they are written, and knows their lines.
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{file}: got {_kind(root)}; allowed: a mapping of flags, such as port: 8000")
        settings = [_setting(file, key, value) for key, value in root.value]
    except OSError as error:
        raise ConfigError(f"--config: got {str(file)!r}; allowed: a YAML file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: got bytes that are not UTF-8; allowed: YAML in UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: this is not YAML: {' '.join(str(error).split())}") from error
    settings_by_key: dict[str, Setting] = {}
    for setting in settings:
        first = settings_by_key.setdefault(setting.key.replace("_", "-"), setting)
        if first is not setting:
            raise ConfigError(f"{setting.place}: {setting.key}: {first.place} has this key already")
    return settings


def _setting(file: Path, key: yaml.Node, value: yaml.Node) -> Setting:
    place = f"{file}:{key.start_mark.line + 1}"
    if not isinstance(key, yaml.ScalarNode):
        raise ConfigError(f"{place}: got {_kind(key)} as a key; allowed: the name of a flag")
    match value:
        case yaml.ScalarNode():
            return Setting(place, key.value, [value.value], False)
        case yaml.SequenceNode():
            return Setting(place, key.value, [_text(item) for item in value.value], True)
    return Setting(place, key.value, [_text(value)], False)


def _text(node: yaml.Node) -> str:
    """A scalar as written. Anything else as JSON."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    constructor = yaml.constructor.SafeConstructor()
    return json.dumps(constructor.construct_document(node), default=str)


def _kind(node: yaml.Node) -> str:
    return {yaml.ScalarNode: "a single value", yaml.SequenceNode: "a list"}.get(type(node), "a mapping")
