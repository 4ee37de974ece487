"""Names what a directory is that looks like a model and is none, such as a LoRA adapter or LFS pointers."""

from __future__ import annotations

import json
from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024
"""Git LFS keeps its pointers smaller than this."""


def without_config(path: Path) -> str | None:
    """What a directory without config.json is, or None if it is nothing known."""
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        return f"this is a LoRA adapter{_base_of(adapter)}; merge it into its model and give the merged model"
    return None


def pointer_in(path: Path) -> str | None:
    """That a file in a model's directory is a pointer of Git LFS. None if there is none."""
    for pattern in ("config.json", "*.safetensors", "tokenizer.json", "*.index.json"):
        for file in sorted(path.glob(pattern)):
            if _is_pointer(file):
                return f"{file.name} is a Git LFS pointer, not the file itself: run git lfs pull there"
    return None


def _is_pointer(file: Path) -> bool:
    try:
        if file.stat().st_size > _POINTER_BYTES:
            return False
        with file.open("rb") as opened:
            return opened.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _base_of(adapter: Path) -> str:
    """The model that an adapter changes, in words."""
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return f" of {base}" if isinstance(base, str) and base.isprintable() and 0 < len(base) < 200 else ""
