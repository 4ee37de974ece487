"""The demo without tokens that end an answer: a test has time to kill or to stop something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesaic.models import files

NOTHING: dict[str, dict[str, Any]] = {
    "config.json": {"eos_token_id": None},
    "tokenizer_config.json": {"eos_token": None, "pad_token": None, "additional_special_tokens": []},
}
"""What the files say of the tokens that end an answer."""


def write(path: Path) -> Path:
    """Writes the checkpoint into an existing folder; returns it. Ends of turns are plain text there."""
    for file in files.resolve("demo").iterdir():
        if file.name != "generation_config.json":
            (path / file.name).write_bytes(file.read_bytes())
    for name, settings in NOTHING.items():
        text = json.loads((path / name).read_text(encoding="utf-8")) | settings
        (path / name).write_text(json.dumps(text), encoding="utf-8")
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] = False
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path
