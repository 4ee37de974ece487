"""A tiny tokenizer without a model, for tests of moesaic and of programs that use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from moesaic.text.tokenizer import byte_level_alphabet


def byte_tokenizer(path: Path, special: Sequence[str] = (), **config: object) -> None:
    """Write a tokenizer into directory `path`. It has one token per byte, followed by the `special` tokens.

    config: entries of tokenizer_config.json, such as chat_template.
    """
    alphabet = byte_level_alphabet()
    added_tokens = [
        {
            "id": len(alphabet) + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added_tokens,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
