"""Reads tokenizers that have tiktoken's ranks in place of a tokenizer.json. Does not import torch.

Such a checkpoint has `tiktoken.model`: one base token a line, its bytes in base64 and its rank. The pattern
that splits a text into pieces stands in the checkpoint's Python code. That code never runs. The patterns of
known tokenizers stand here, and a checkpoint must show that one of them is its own.
"""

from __future__ import annotations

import ast
import base64
import binascii
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from moesaic.core.errors import CheckpointError

FILE = "tiktoken.model"
MOST_RANKS = 64 << 20
"""Largest file of ranks in bytes. That of Kimi K2 has 2.8 MB."""
MOST_CODE = 1 << 20
"""Largest Python file in bytes that is looked at for its pattern."""
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


@dataclass(frozen=True)
class KnownTokenizer:
    """A tokenizer whose pattern is known."""

    models: str
    """The models that have it, for people."""
    tokenizer_class: str
    """Class in tokenizer_config.json."""
    base_tokens: int
    """Number of ranks."""
    num_reserved: int
    """Number of ids after the base tokens. Those without a name of their own are `<|reserved_token_ID|>`."""
    pattern: str
    """It splits a text into pieces, which are encoded one by one."""


KNOWN_TOKENIZERS = (
    KnownTokenizer(
        models="Kimi K2, Moonlight",
        tokenizer_class="TikTokenTokenizer",
        base_tokens=163_584,
        num_reserved=256,
        pattern="|".join(
            (
                r"[\p{Han}]+",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
    ),
)


def read(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the tokenizer of the checkpoint in directory `path`. settings: its tokenizer_config.json.

    Raises CheckpointError for a damaged file, and for a tokenizer whose pattern is not known.
    """
    ranks = read_ranks(path / FILE)
    known_tokenizer = _find_known_tokenizer(path, settings, len(ranks))
    return build(ranks, known_tokenizer, _read_added_tokens(path, settings, known_tokenizer))


def read_ranks(file: Path) -> dict[bytes, int]:
    """Reads tiktoken's ranks: base tokens in the order of their ids, from 0.

    Raises CheckpointError, naming the line, for a file that is no such list or lacks one of the 256 bytes.
    """
    try:
        if file.stat().st_size > MOST_RANKS:
            raise CheckpointError(f"{file}: got {file.stat().st_size} bytes; allowed: at most {MOST_RANKS}")
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        token = _token(line, len(ranks))
        if token is None or token in ranks:
            raise CheckpointError(
                f"{file}: line {number}: got {line[:60]!r}; allowed: a new token in base64, a space, "
                f"and its rank {len(ranks)}"
            )
        ranks[token] = len(ranks)
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise CheckpointError(f"{file}: the token of byte {missing} is missing")
    return ranks


def _token(line: bytes, rank: int) -> bytes | None:
    """The token of a line with this rank; None for any other line."""
    base64_text, _, number = line.partition(b" ")
    if number != str(rank).encode():
        return None
    try:
        return base64.b64decode(base64_text, validate=True) or None
    except binascii.Error:
        return None


def _find_known_tokenizer(path: Path, settings: Mapping[str, Any], count: int) -> KnownTokenizer:
    """The known tokenizer that the checkpoint has, by its class, its number of ranks and its own pattern."""
    class_name = settings.get("tokenizer_class")
    choices = ", ".join(
        f"{candidate.tokenizer_class} with {candidate.base_tokens} ({candidate.models})"
        for candidate in KNOWN_TOKENIZERS
    )
    for candidate in KNOWN_TOKENIZERS:
        if (class_name, count) == (candidate.tokenizer_class, candidate.base_tokens):
            _check_pattern(path, candidate)
            return candidate
    raise CheckpointError(
        f"{path / FILE}: got tokenizer_class {str(class_name)[:60]!r} with {count} base tokens, whose "
        f"pattern is not known; allowed: {choices}, or a tokenizer.json"
    )


def _check_pattern(path: Path, known_tokenizer: KnownTokenizer) -> None:
    """Raises CheckpointError if the checkpoint's Python code is here and has another pattern."""
    for file in sorted(path.glob("tokenization_*.py")):
        pattern = read_pattern(file)
        if pattern != known_tokenizer.pattern:
            own_pattern = "none that can be read" if pattern is None else repr(pattern[:60])
            raise CheckpointError(
                f"{file}: pat_str: got {own_pattern}; allowed: the pattern of {known_tokenizer.models}"
            )


def read_pattern(file: Path) -> str | None:
    """The value of `pat_str` in a Python file: a text, or texts joined by a text. None if there is none.

    The file is parsed and never executed.
    """
    try:
        if file.stat().st_size > MOST_CODE:
            return None
        with warnings.catch_warnings(action="ignore"):  # of a text that nobody runs
            tree = ast.parse(file.read_bytes())
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and _names(node)]
        return _text(values[0]) if len(values) == 1 else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(node: ast.Assign) -> bool:
    return [getattr(target, "id", None) for target in node.targets] == ["pat_str"]


def _text(value: ast.expr) -> str | None:
    """The text of `"..."` or of `"...".join(["...", ...])`. Raises ValueError for what is no literal."""
    match value:
        case ast.Call(func=ast.Attribute(value=separator, attr="join"), args=[parts], keywords=[]):
            return str(ast.literal_eval(separator)).join(map(str, ast.literal_eval(parts)))
        case _:
            literal_value = ast.literal_eval(value)
            return literal_value if isinstance(literal_value, str) else None


def _read_added_tokens(
    path: Path, settings: Mapping[str, Any], known_tokenizer: KnownTokenizer
) -> list[AddedToken]:
    """The tokens after the base tokens, in the order of their ids."""
    file, entries = path / "tokenizer_config.json", settings.get("added_tokens_decoder", {})
    ids = range(known_tokenizer.base_tokens, known_tokenizer.base_tokens + known_tokenizer.num_reserved)
    named_tokens: dict[int, AddedToken] = {}
    for key, entry in entries.items() if isinstance(entries, Mapping) else [("", None)]:
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not key.isdecimal() or int(key) not in ids or not isinstance(content, str) or not content:
            requirement = f"an id of {ids.start} to {ids.stop - 1} with its content"
            got = f"{key[:20]!r}: {str(entry)[:60]!r}"
            raise CheckpointError(f"{file}: added_tokens_decoder: got {got}; allowed: {requirement}")
        special = isinstance(entry, Mapping) and entry.get("special") is True
        named_tokens[int(key)] = AddedToken(content, normalized=False, special=special)
    added_tokens = [
        named_tokens.get(token_id)
        or AddedToken(f"<|reserved_token_{token_id}|>", normalized=False, special=True)
        for token_id in ids
    ]
    if len({token.content for token in added_tokens}) < len(added_tokens):
        raise CheckpointError(f"{file}: added_tokens_decoder: two tokens have the same content")
    return added_tokens


def build(
    ranks: Mapping[bytes, int], known_tokenizer: KnownTokenizer, added_tokens: list[AddedToken]
) -> tokenizers.Tokenizer:
    """Builds a tokenizer of the `tokenizers` library that encodes as tiktoken does.

    added_tokens: the tokens after the base tokens, which are found in a text before it is split. Raises
    CheckpointError for one that is written like a base token, since the library would give it that id.
    """
    character = {byte: letter for letter, byte in byte_level_alphabet().items()}
    text = {token: "".join(character[byte] for byte in token) for token in ranks}
    merges = [(text[left], text[right]) for left, right in _merges(ranks)]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    # tiktoken takes a piece that is a token as it is. Only other pieces are merged.
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(known_tokenizer.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added_tokens)
    for number, token in enumerate(added_tokens, len(ranks)):
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointError(f"{FILE}: the added token {token.content[:60]!r} is also a base token")
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of base tokens that together are a base token, in the order of the ranks of the latter.

    tiktoken merges the neighbours whose merged token has the lowest rank. So each way to put a token
    together counts as a merge.
    """
    return [
        (token[:split], token[split:])
        for token in ranks
        for split in range(1, len(token))
        if token[:split] in ranks and token[split:] in ranks
    ]


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2). Every byte has a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + offset): byte for offset, byte in enumerate(hidden)}
