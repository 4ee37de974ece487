"""The requests of a benchmark: prompts, lengths and times. Pure functions, except for reading files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.core.errors import ConfigError

Prompt = str | list[int]


@dataclass(frozen=True)
class Item:
    """A request of a benchmark: its prompt, the length of its answer, and when it is sent."""

    prompt: Prompt
    output_len: int
    """Number of tokens to generate."""
    arrival: float = 0.0
    """Time of sending, in seconds after the start."""


_WORD_LINES = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl moment air teacher force
education import return class def self lambda yield
"""
WORDS = tuple(_WORD_LINES.split())
"""Common words."""

POOL_TEXT = " ".join(
    f"{word}{number} {word.upper()} {word.title()}s, {number * number}: ({word}_{number}) [{word}ing];"
    for number, word in enumerate(WORDS)
)
"""A text with many different tokens. Random prompts use them if only the server knows the vocabulary."""


def token_pool(token_ids: Sequence[int]) -> list[int]:
    """The distinct ids, ascending."""
    return sorted(set(token_ids))


def random_prompts(
    lengths: Sequence[int], pool: Sequence[int] | range, rng: np.random.Generator, prefix_len: int = 0
) -> list[Prompt]:
    """Prompts of these lengths, with tokens drawn from `pool`.

    prefix_len: tokens that all of them begin with. A prefix cache helps with these alone.
    """
    alphabet = np.asarray(pool)
    prefix = rng.integers(0, len(alphabet), prefix_len)
    draws = (np.concatenate((prefix, rng.integers(0, len(alphabet), length))) for length in lengths)
    return [alphabet[draw].tolist() for draw in draws]


def read_prompts(path: Path) -> list[tuple[str, int | None]]:
    """(text, output tokens) of each line of a JSONL file.

    The text is the field prompt, question or text, or the first of turns (MT-Bench). The number of output
    tokens is the field output_tokens, or None without that field.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path: {path}: {error}") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError.field("--dataset-path", str(path), "a JSONL file with at least one line")
    return rows


def cycle_rows(rows: Sequence[tuple[str, int | None]], count: int, output_len: int) -> list[tuple[str, int]]:
    """The first `count` rows; starts again at the first row if there are too few.

    output_len: output tokens of a row without a number of its own.
    """
    cycled_rows = (rows[index % len(rows)] for index in range(count))
    return [(text, row_length or output_len) for text, row_length in cycled_rows]


def _row(path: Path, number: int, line: str) -> tuple[str, int | None]:
    place = f"--dataset-path: {path} line {number}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    match row:
        case {"prompt": str(text)} | {"question": str(text)} | {"text": str(text)}:
            pass
        case {"turns": [str(text), *_]}:
            pass
        case _:
            raise ConfigError(f"{place}: no text; allowed: the field prompt, question, text or turns")
    # A number that is no positive integer counts as missing, so the default applies.
    tokens = row.get("output_tokens")
    return text, tokens if isinstance(tokens, int) and tokens > 0 else None
