"""The tokens that stand beside tokenizer.json: in tokenizer_config.json and in files of older programs.

transformers takes the union of all of these. Ids are those of the files.

Question: Where do special tokens come from?
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from moesaic.core.errors import CheckpointError

SETTINGS, SPECIAL_TOKENS, TOKEN_IDS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MOST_BYTES = 16 << 20
"""Largest of these files in bytes. Real ones have less than one MB, with thousands of added tokens."""
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys with a special token."""
LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Keys with several."""


class TokenEntry(NamedTuple):
    """A token that a file names, and its id."""

    source: str
    """The file and the key, for messages."""
    number: int | None
    token: tokenizers.AddedToken


def read_settings(path: Path) -> dict[str, Any]:
    """Returns what tokenizer_config.json says, and the special tokens that only special_tokens_map.json has.

    Raises CheckpointError for a damaged file.
    """
    special_tokens = _read_object(path / SPECIAL_TOKENS)
    map_tokens = {key: special_tokens[key] for key in (*NAMES, *LISTS) if special_tokens.get(key) is not None}
    return {**map_tokens, **_read_object(path / SETTINGS)}


def add(tokenizer: tokenizers.Tokenizer, path: Path, settings: Mapping[str, Any]) -> None:
    """Adds the tokens that tokenizer.json lacks, and marks those that other files call special.

    Raises CheckpointError for a token whose id the tokenizer cannot give to it.
    """
    flags_of_text = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    for entry in sorted(_list_entries(path, settings), key=lambda entry: entry.number or 0):
        token, number = entry.token, tokenizer.token_to_id(entry.token.content)
        if number is None and entry.number is None:
            continue  # without an id there is no row of the embedding for it
        if flags_of_text.get(token.content) is None or (token.special and not flags_of_text[token.content]):
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
            flags_of_text[token.content] = token.special
        if number is None and tokenizer.token_to_id(token.content) != entry.number:
            got = tokenizer.token_to_id(token.content)
            raise CheckpointError(
                f"{path / entry.source}: the token {token.content!r}: got id {entry.number}; allowed: "
                f"{got}, the next one after those of tokenizer.json"
            )


def _list_entries(path: Path, settings: Mapping[str, Any]) -> Iterator[TokenEntry]:
    decoder = settings.get("added_tokens_decoder")
    for number, value in (decoder if isinstance(decoder, dict) else {}).items():
        if str(number).isascii() and str(number).isdigit():
            yield from _read_token(f"{SETTINGS}: added_tokens_decoder", int(number), value, False)
    for text, number in _read_object(path / TOKEN_IDS).items():
        if isinstance(number, int) and not isinstance(number, bool):
            yield from _read_token(TOKEN_IDS, number, text, False)
    for name in NAMES:
        yield from _read_token(f"{SETTINGS}: {name}", None, settings.get(name), True)
    for name in LISTS:
        values = settings.get(name)
        values = list(values.values()) if isinstance(values, dict) else values
        for value in values if isinstance(values, list) else []:
            yield from _read_token(f"{SETTINGS}: {name}", None, value, True)


def _read_token(source: str, number: int | None, value: object, special: bool) -> Iterator[TokenEntry]:
    """Reads a token: its text, or an object with the text and how it is found in texts."""
    if isinstance(value, str) and value:
        yield TokenEntry(
            source, number, tokenizers.AddedToken(value, normalized=not special, special=special)
        )
    elif isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        flags = {
            name: value[name]
            for name in ("single_word", "lstrip", "rstrip", "normalized")
            if isinstance(value.get(name), bool)
        }
        is_special = special or value.get("special") is True
        yield TokenEntry(source, number, tokenizers.AddedToken(value["content"], special=is_special, **flags))


def _read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if there is no such file."""
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value
