"""Reads prompts and their topics from files of several formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError

TEXTS = ("prompt", "question", "text", "turns")
"""Fields that may contain a prompt, in order of preference."""
TOPICS = ("topic", "category", "domain")


@dataclass(frozen=True)
class Prompt:
    """A prompt with its topic."""

    text: str | list[int]
    """The prompt's text, or its token ids."""
    topic: str
    where: str = field(default="", compare=False)
    """File and line of the prompt, for messages."""


def read(files: Sequence[Path], most: int | None = None, flag: str = "--prompts") -> list[Prompt]:
    """Read the first `most` prompts of each file. Raises ConfigError naming a line that is not a prompt.

    flag: that of the files, for messages.

    Example: a.jsonl with {"question": "1 + 1?"} -> Prompt("1 + 1?", "a").
    """
    found: list[Prompt] = []
    for file in files:
        mine = list(islice(_prompts(file, len(files) == 1, flag), most))
        if not mine:
            raise ConfigError.field(flag, str(file), "a file with at least one prompt")
        found += mine
    return found


def _prompts(file: Path, own_topics: bool, flag: str) -> Iterator[Prompt]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{flag}: {file}, line {number}"
                if file.suffix == ".jsonl":
                    yield _of_json(line, where, file.stem, own_topics)
                else:
                    yield Prompt(line.rstrip("\r\n"), file.stem, where)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {file}: not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from error


def _of_json(line: str, where: str, stem: str, own_topics: bool) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: got {type(found).__name__}; allowed: an object")
    topic = next((str(found[name]) for name in TOPICS if found.get(name)), stem) if own_topics else stem
    return Prompt(_text(found, where), topic, where)


def _text(found: dict[str, Any], where: str) -> str | list[int]:
    name = next((name for name in TEXTS if name in found), None)
    if name is None:
        raise ConfigError(f"{where}: has none of {', '.join(TEXTS)}")
    text = found[name]
    if name == "turns" and isinstance(text, list) and text:
        text = text[0]
    if isinstance(text, str) and text:
        return text
    if name == "prompt" and isinstance(text, list) and text and all(type(token) is int for token in text):
        return text
    raise ConfigError(f"{where}: {name}: got {str(text)[:40]!r}; allowed: text that is not empty")
