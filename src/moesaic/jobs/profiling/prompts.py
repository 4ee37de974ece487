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
    location: str = field(default="", compare=False)
    """File and line of the prompt, for messages."""


def read(files: Sequence[Path], max_prompts: int | None = None, flag: str = "--prompts") -> list[Prompt]:
    """Read the first `max_prompts` prompts of each file.

    Raises ConfigError naming a line that is not a prompt.
    flag: that of the files, for messages.

    Example: a.jsonl with {"question": "1 + 1?"} -> Prompt("1 + 1?", "a").
    """
    prompts: list[Prompt] = []
    for file in files:
        file_prompts = list(islice(_prompts(file, len(files) == 1, flag), max_prompts))
        if not file_prompts:
            raise ConfigError.field(flag, str(file), "a file with at least one prompt")
        prompts += file_prompts
    return prompts


def _prompts(file: Path, own_topics: bool, flag: str) -> Iterator[Prompt]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                location = f"{flag}: {file}, line {number}"
                if file.suffix == ".jsonl":
                    yield _parse_line(line, location, file.stem, own_topics)
                else:
                    yield Prompt(line.rstrip("\r\n"), file.stem, location)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {file}: not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from error


def _parse_line(line: str, location: str, stem: str, own_topics: bool) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{location}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{location}: got {type(fields).__name__}; allowed: an object")
    topic = next((str(fields[name]) for name in TOPICS if fields.get(name)), stem) if own_topics else stem
    return Prompt(_text(fields, location), topic, location)


def _text(fields: dict[str, Any], location: str) -> str | list[int]:
    name = next((name for name in TEXTS if name in fields), None)
    if name is None:
        raise ConfigError(f"{location}: has none of {', '.join(TEXTS)}")
    text = fields[name]
    if name == "turns" and isinstance(text, list) and text:
        text = text[0]
    if isinstance(text, str) and text:
        return text
    # isinstance would also accept true and false, which are integers in Python.
    if name == "prompt" and isinstance(text, list) and text and all(type(token) is int for token in text):
        return text
    raise ConfigError(f"{location}: {name}: got {str(text)[:40]!r}; allowed: text that is not empty")
