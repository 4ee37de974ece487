"""The bytes of a tokenizer's tokens, in the library's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from moesaic.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """What each token stands for."""

    tokens: Sequence[bytes]
    """By id. A token without bytes is never allowed."""
    special: frozenset[int]
    """Ids of tokens that no text matches."""

    def compiled(self, width: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """The vocabulary for compiling grammars.

        width: number of logits, which may be more or less than the tokens. eos_token_ids: at least one.
        """
        tokens = [*self.tokens[:width], *[b""] * (width - len(self.tokens))]
        special = sorted(number for number in self.special | set(eos_token_ids) if number < width)
        given = _Tokens(tokens, special, eos_token_ids[0])
        return LLTokenizer(TokenizerWrapper(given), n_vocab=width, eos_token=list(eos_token_ids))


def read(path: Path) -> Vocabulary:
    """The vocabulary of the checkpoint at `path`."""
    tokenizer = Tokenizer(path, with_template=False)
    return Vocabulary(tokenizer.all_bytes(), frozenset(tokenizer.special_tokens.values()))


class _Tokens:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id
        self._bytes = {token: number for number, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Ids of single bytes. The library only asks for tokens that it would force, which is not used."""
        return [self._bytes[text[at : at + 1]] for at in range(len(text)) if text[at : at + 1] in self._bytes]
