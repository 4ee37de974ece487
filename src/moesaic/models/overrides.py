"""Changes of config.json by hand (--hf-overrides), as JSON merge patches (RFC 7396).

A changed model is a directory of links to the files of the model, with a config.json of its own. So every
reader sees the change, and nothing of the model is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.models.config import shorten
from moesaic.models.gguf.header import is_gguf

FLAG, CONFIG = "--hf-overrides", "config.json"
_log = logging.getLogger(__name__)


def parse(text: str) -> dict[str, Any]:
    """Parses the value of the flag. Raises ConfigError for anything but a JSON object with keys."""
    try:
        patch = json.loads(text)
    except (ValueError, RecursionError):
        patch = None
    if not isinstance(patch, dict) or not patch:
        raise ConfigError.field(FLAG, shorten(text), 'a JSON object, such as {"key": null}')
    return patch


def merge(raw: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json with a patch: null drops a key, objects are merged, other values replace.

    Raises ConfigError for a key to drop that is not there.

    >>> merge({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": 4}})
    {'b': {'c': 4, 'd': 3}}
    """
    result = dict(raw)
    for name, value in patch.items():
        if value is None and name not in raw:
            raise ConfigError.field(FLAG, shorten(name), "keys of config.json, of those to drop")
        if value is None:
            del result[name]
        elif isinstance(value, Mapping):
            inner = raw.get(name)
            result[name] = merge(inner if isinstance(inner, Mapping) else {}, value)
        else:
            result[name] = value
    return result


def describe(raw: Mapping[str, Any], patch: Mapping[str, Any], front: str = "") -> Iterator[str]:
    """Says what a patch changes, one sentence for each key.

    >>> list(describe({"a": 1, "b": {"c": 2}}, {"a": None, "b": {"c": 4}}))
    ['config.json: a (1) is left out', 'config.json: b.c is 4 and not 2']
    """
    for name, value in patch.items():
        inner = raw.get(name)
        if isinstance(value, Mapping):
            yield from describe(inner if isinstance(inner, Mapping) else {}, value, f"{front}{name}.")
            continue
        key, old = shorten(front + name), shorten(json.dumps(inner))
        if value is None:
            yield f"{CONFIG}: {key} ({old}) is left out"
        else:
            yield f"{CONFIG}: {key} is {shorten(json.dumps(value))}" + (
                f" and not {old}" if name in raw else ""
            )


def overlay(path: Path, patch: Mapping[str, Any], raw: Mapping[str, Any], folder: Path) -> Path:
    """Makes the directory of a changed model in `folder`, and returns it. One that is there already is taken.

    path: the directory of the model. raw: its parsed config.json. Raises ConfigError for a GGUF file, and
    where nothing can be written.
    """
    if is_gguf(path):
        raise ConfigError(f"{FLAG}: got {path}, a GGUF file; allowed: a model with a config.json")
    config = json.dumps(merge(raw, patch), indent=2)
    files = sorted(file.absolute() for file in path.iterdir() if file.name != CONFIG)
    key = "\n".join([config, *map(str, files)])
    target = folder / hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    for sentence in describe(raw, patch):
        _say(sentence)
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            model = Path(draft) / "model"
            model.mkdir()
            (model / CONFIG).write_text(config + "\n", encoding="utf-8")
            for file in files:
                (model / file.name).symlink_to(file)
            _rename(model, target)
    except OSError as error:
        raise ConfigError(f"{FLAG}: {folder}: cannot be written ({error.strerror})") from error
    return target


def _rename(model: Path, target: Path) -> None:
    try:
        model.rename(target)
    except OSError:
        if not target.is_dir():  # else another process has made the same directory
            raise


@cache
def _say(sentence: str) -> None:
    """Writes to the log what was changed by hand, once in a process."""
    _log.warning("%s", sentence)
