"""The prompts of an offload benchmark: a file's questions, over and over, in tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

Encode = Callable[[str], list[int]]


def questions(path: Path) -> list[str]:
    """The first turn of each line, as in MT-Bench, or its `prompt` or `question`."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row.get("prompt") or row.get("question")
        if text:
            found.append(str(text))
    if not found:
        raise SystemExit(f"--prompts: {path}: no line has turns, a prompt or a question")
    return found


def prompts(texts: list[str], encode: Encode, count: int, length: int) -> list[list[int]]:
    """`count` prompts of at most `length` tokens, the texts repeated in their order.

    Example: texts of 3 and 9 tokens, count 3, length 4 -> prompts of 3, 4 and 3 tokens.
    """
    encoded = [encode(text)[:length] for text in texts[:count]]
    return list(islice(cycle(encoded), count))
